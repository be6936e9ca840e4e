from io import StringIO

from rich.console import Console

from streamrl.deploy.local.watching import live_view, plain_line
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from tests.coordinator.factories import heartbeat
from tests.observability.run_state.test_step_history import report
from tests.schemas.examples import examples


def evaluated(step: int, passed: float) -> EvaluationReport:
    found = examples()["evaluation-report"].replace(version=PolicyVersion(1, step), metrics={"eval/pass@1": passed})
    assert isinstance(found, EvaluationReport)
    return found


def test_the_line_has_reward_loss_and_the_newest_held_out_result() -> None:
    state, console = RunState("run"), Console(width=120, file=StringIO())
    step = report(1, 2)
    state.observe_message(step.replace(metrics={**step.metrics, "loss": -0.01234}))
    state.observe_message(heartbeat("w7", sent_at=100.0))
    state.observe_message(evaluated(0, 0.25))
    line = "step 2/10  reward 0.500  loss -0.0123  pass@1 0.250 (step 0)  0 traj/s  staleness 1.5  lag 9  1 worker"
    assert plain_line(state, 10, 101.0) == line
    with console.capture() as shown:
        console.print(live_view(state, 10, {}, 101.0))
    assert "step 2/10  reward 0.500  loss -0.0123  pass@1 0.250 (step 0)  0 traj/s" in shown.get().splitlines()[0]


def test_the_line_fits_a_terminal_and_what_matters_least_gives_way() -> None:
    state = RunState("run")
    for number in range(2):
        step = report(1, 199_990 + number).replace(sent_at=100.0 + 4000 * number)
        state.observe_message(step.replace(metrics={**step.metrics, "loss": -1.2345e-05, "reward": -123.456}))
    state.observe_message(evaluated(199_980, 0.25))
    line = plain_line(state, 200_000, 4101.0)
    assert len(line) <= 120
    assert line.startswith(
        "step 199991/200000  reward -123.456  loss -1.23e-05  pass@1 0.250 (step 199980)  0 traj/s  "
    )
    assert "worker" not in line


def test_a_warning_has_a_line_of_its_own() -> None:
    state = RunState("run")
    state.observe_message(report(1, 2).replace(sent_at=100.0))
    first, second = plain_line(state, 10, 1000.0).splitlines()
    assert first.startswith("step 2/10")
    assert second.startswith("warning: no step for 900 s: ")


def test_a_resumed_run_shows_nothing_old_as_present() -> None:
    state, console = RunState("run"), Console(width=200, file=StringIO())
    state.observe_message(report(1, 450).replace(sent_at=90.0))
    line = plain_line(state, 403, 101.0, since=100.0)
    assert line == "resuming: the last start ended after step 450; its trainer restores a checkpoint"
    with console.capture() as shown:
        console.print(live_view(state, 403, {}, 101.0, since=100.0))
    assert shown.get().strip() == line
    state.observe_message(report(2, 400).replace(sent_at=102.0))
    assert "step 400/403" in plain_line(state, 403, 103.0, since=100.0)


def test_before_the_first_step_it_says_what_is_done() -> None:
    line = "step 0/10  starting: the trainer loads the model and writes its first weights"
    assert plain_line(RunState("run"), 10, 0.0) == line
    console = Console(width=200, file=StringIO())
    with console.capture() as shown:
        console.print(live_view(RunState("run"), 10, {}, 0.0))
    assert line in shown.get()


def test_after_the_first_step_nothing_starts() -> None:
    state = RunState("run")
    state.observe_message(report(1, 2))
    assert "starting" not in plain_line(state, 10, 101.0)
