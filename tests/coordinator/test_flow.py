import pytest

from coordinator.state import FlowDecision, FlowMode, decide
from schemas.control import OperatorCommand


def command(action: str, worker_id: str | None = None) -> OperatorCommand:
    return OperatorCommand.model_validate({"action": action, "worker_id": worker_id, "reason": "test", "sent_at": 0.0})


@pytest.mark.parametrize(
    ("action", "current", "mode"),
    [("pause", "run", "pause"), ("resume", "pause", "run"), ("drain", "run", "drain"), ("drain", "pause", "drain")],
)
def test_a_command_that_changes_the_flow_is_carried_out(action: str, current: FlowMode, mode: FlowMode) -> None:
    assert decide(command(action), current, finished=False) == FlowDecision(mode=mode, reason="test")


@pytest.mark.parametrize(("action", "current"), [("pause", "pause"), ("resume", "run"), ("resume", "drain")])
def test_a_command_that_changes_nothing_or_revives_a_draining_run_is_refused(action: str, current: FlowMode) -> None:
    assert decide(command(action), current, finished=False) is None


def test_a_finished_run_can_no_longer_be_paused() -> None:
    assert decide(command("pause"), "run", finished=True) is None


def test_one_worker_can_be_drained_and_needs_a_name() -> None:
    assert decide(command("drain_worker", "w1"), "run", False) == FlowDecision(drain_worker="w1", reason="test")
    assert decide(command("drain_worker"), "run", False) is None
