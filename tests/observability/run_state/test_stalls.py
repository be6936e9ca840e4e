"""What a run without a new step is said to wait for."""

from typing import Any

import pytest

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.observability.run_state.stalls import first_step_waits_for, waiting_for
from streamrl.observability.run_state.state import STALL_S, RunState
from streamrl.schemas.reports import Heartbeat, StepReport, WorkerState
from streamrl.settings.loading import validated
from streamrl.settings.tree import RunSettings
from tests.schemas.examples import examples


def beat(**changes: Any) -> Heartbeat:
    found = examples()["heartbeat"]
    assert isinstance(found, Heartbeat)
    return found.replace(**{"worker_id": "w", "state": WorkerState.READY, "running": 0, "waiting": 0} | changes)


@pytest.mark.parametrize(
    ("mode", "workers", "lag", "expected"),
    [
        ("pause", [beat(running=3)], 5, "the run is paused"),
        ("drain", [], 0, "the run is drained"),
        ("run", [], 5, "no worker is alive"),
        ("run", [beat(state=WorkerState.STARTING)], 5, "all workers still load the model: w"),
        ("run", [beat(running=2, tokens_per_s=7.0), beat(running=1, tokens_per_s=5.0)], 5, "workers sample 3 comple"),
        ("run", [beat()], 1500, "the trainer has 1,500 trajectories"),
        ("run", [beat(), beat(state=WorkerState.STARTING)], 0, "workers have nothing to sample"),
    ],
)
def test_the_first_thing_that_is_missing_is_named(mode: str, workers: list[Heartbeat], lag: int, expected: str) -> None:
    assert waiting_for(mode, workers, lag).startswith(expected)


@pytest.mark.parametrize(
    ("is_ready", "workers", "sampled", "wanted", "expected"),
    [
        (False, [beat()], 0, 64, "the trainer loads the model"),
        (True, [], 0, 64, "no worker is up"),
        (True, [beat(state=WorkerState.STARTING)] * 2, 0, 64, "no worker has loaded the model yet; loading: 2"),
        (
            True,
            [beat(state=WorkerState.STARTING), beat(running=8, tokens_per_s=90.0)],
            12,
            64,
            "12 of 64 trajectories of the first step; 8 completions run at 90 tokens/s",
        ),
        (True, [beat(running=8, tokens_per_s=90.0)], 12, None, "12 trajectories of the first step; 8 completions"),
        (True, [beat()], 64, 64, "the trainer has 64 trajectories and computes the first step"),
    ],
)
def test_before_the_first_step_it_says_what_is_done_and_how_far_it_is(
    is_ready: bool, workers: list[Heartbeat], sampled: int, wanted: int | None, expected: str
) -> None:
    assert first_step_waits_for(is_ready, workers, sampled, wanted).startswith(expected)


def test_trajectories_that_were_skipped_do_not_wait_for_the_first_step() -> None:
    state, report = RunState("r"), examples()["step-report"]
    assert isinstance(report, StepReport)
    state.observe_message(report.replace(policy=None, group_ids=(), micro_batches=(), finished=False))
    state.observe_message(beat(sent_at=1.0, running=8, tokens_per_s=90.0))
    state.note_ends({0: 40, 1: 30})
    state.progress.step_trajectories = 8
    state.refusals.since_step.update({"zero_advantage": 66})
    assert state.before_first_step(1.0) == (
        "4 of 8 trajectories of the first step, 66 were skipped; 8 completions run at 90 tokens/s"
    )


def test_a_run_starts_until_its_trainer_has_taken_a_step_also_after_a_restart() -> None:
    state, report = RunState("r"), examples()["step-report"]
    assert isinstance(report, StepReport)
    assert (state.before_first_step(1.0) or "").startswith("the trainer loads")
    begin = report.replace(policy=None, group_ids=(), micro_batches=(), finished=False)
    state.observe_message(begin)
    assert state.before_first_step(1.0) == "no worker is up"
    version = report.version
    state.observe_message(report.replace(policy=None, version=version._replace(number=version.number + 1)))
    assert state.before_first_step(1.0) is None
    state.observe_message(begin.replace(version=version._replace(lineage=version.lineage + 1)))
    assert state.before_first_step(1.0) == "no worker is up"


def test_a_run_without_a_step_for_two_minutes_says_what_it_waits_for() -> None:
    state, report = RunState("r"), examples()["step-report"]
    assert isinstance(report, StepReport)
    state.observe_message(report.replace(sent_at=1000.0, policy=None, finished=False))
    assert state.warning(1000.0 + STALL_S - 1) is None
    warning = state.warning(1000.0 + STALL_S)
    assert warning is not None
    assert warning.startswith("no step for 120 s: no worker is alive")


def test_the_time_until_a_run_is_stalled_is_a_setting() -> None:
    settings = validated({"model": {"path": "m"}, "data": {"dataset": "chain_sum"}, "run": {"stall_s": 7}})
    state, report = RunConnection(settings.kafka, "r", settings).new_state(), examples()["step-report"]
    assert isinstance(report, StepReport)
    state.observe_message(report.replace(sent_at=1000.0, policy=None, finished=False))
    assert state.warning(1006.0) is None
    assert (state.warning(1007.0) or "").startswith("no step for 7 s")


def test_without_settings_the_default_counts() -> None:
    assert RunConnection(KafkaSettings(), "r").new_state().stall_s == RunSettings().stall_s


def test_a_run_whose_steps_take_long_is_not_stalled_after_two_minutes() -> None:
    state, report = RunState("r"), examples()["step-report"]
    assert isinstance(report, StepReport)
    version = report.version
    for number in range(3):
        after = version.__class__(version.lineage, version.number + number)
        changes = {"sent_at": 1000.0 * number, "policy": None, "finished": False, "step": 4 + number, "version": after}
        state.observe_message(report.replace(**changes))
    assert state.warning(2000.0 + 4999) is None
    assert (state.warning(2000.0 + 5000) or "").startswith("no step for 5000 s")
