"""What a run without a new step is said to wait for."""

from typing import Any

import pytest

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.observability.run_state.stalls import waiting_for
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
