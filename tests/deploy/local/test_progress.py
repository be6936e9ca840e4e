from io import StringIO

from rich.console import Console

from streamrl.deploy.local.watching import live_view, plain_line
from streamrl.observability.run_state.state import RunState
from tests.coordinator.factories import heartbeat
from tests.observability.run_state.test_step_history import report


def test_the_plain_line_names_reward_lag_staleness_and_the_version_of_each_worker() -> None:
    state = RunState("run")
    state.observe_message(report(1, 2))
    state.observe_message(heartbeat("w7", sent_at=100.0))
    line = plain_line(state, 10, 101.0)
    for part in ("step 2/10", "reward 0.500", "staleness 1.5", "b0:2 b1:7", "w7@1-0"):
        assert part in line


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


def test_before_the_first_step_there_is_no_reward() -> None:
    assert "step 0/10  reward -  " in plain_line(RunState("run"), 10, 0.0)
    console = Console(width=200, file=StringIO())
    with console.capture() as shown:
        console.print(live_view(RunState("run"), 10, {}, 0.0))
    assert "step 0/10  reward -  " in shown.get()
