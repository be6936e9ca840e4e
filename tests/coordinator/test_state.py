import pytest

from streamrl.coordinator.state import FlowDecision, FlowMode, VersionLedger, decide
from streamrl.schemas.control import OperatorCommand
from streamrl.schemas.identifiers import PolicyVersion
from tests.coordinator.factories import step_report


def announce(ledger: VersionLedger) -> PolicyVersion | None:
    report = ledger.to_announce()
    if report is None:
        return None
    ledger.announced = report.version
    return report.version


def test_announced_versions_only_grow() -> None:
    ledger = VersionLedger()
    announced = []
    for number in (0, 1, 3, 2, 3, 4):
        ledger.observe_report(step_report(1, number))
        announced.append(announce(ledger))
    assert announced == [PolicyVersion(1, 0), PolicyVersion(1, 1), PolicyVersion(1, 3), None, None, PolicyVersion(1, 4)]


def test_a_step_without_exported_weights_is_not_announced() -> None:
    ledger = VersionLedger()
    ledger.observe_report(step_report(1, 1))
    assert announce(ledger) == PolicyVersion(1, 1)
    assert not ledger.observe_report(step_report(1, 2).replace(manifest_sha256=None))
    assert announce(ledger) is None
    assert ledger.is_newest(step_report(1, 2))


def test_orphans_never_win() -> None:
    ledger = VersionLedger()
    ledger.observe_report(step_report(1, 105))
    announce(ledger)
    assert ledger.observe_report(step_report(2, 101))
    assert announce(ledger) == PolicyVersion(2, 101)
    assert not ledger.observe_report(step_report(1, 106))
    assert announce(ledger) is None
    assert not ledger.is_newest(step_report(1, 106))


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
