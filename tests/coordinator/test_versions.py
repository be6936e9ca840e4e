from coordinator.state import VersionLedger
from schemas.identifiers import PolicyVersion
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
