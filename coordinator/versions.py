"""The version ledger: which weights were reported, which were announced. Pure; knows no topics.

Invariants, each guaranteed here:
- announced_versions_only_grow: an announcement is newer, by (lineage, number), than every earlier one;
- orphans_never_win: weights of an older lineage are never announced after a newer lineage's.
"""

from dataclasses import dataclass

from schemas.identifiers import PolicyVersion
from schemas.messages.control import WeightsReady
from schemas.messages.reports import StepReport


@dataclass
class VersionLedger:
    """Reported and announced versions of one policy."""

    announced: PolicyVersion | None = None
    latest: StepReport | None = None

    def observe_report(self, report: StepReport) -> bool:
        """Note a step; true if it exported weights that are newer than every other's."""
        if report.manifest_sha256 is None or not (self.latest is None or report.version > self.latest.version):
            return False
        self.latest = report
        return True

    def is_newest(self, report: StepReport) -> bool:
        """Whether no newer weights than this report's are known."""
        return self.latest is None or report.version >= self.latest.version

    def observe_announcement(self, message: WeightsReady) -> bool:
        """Note an announcement, our own or one found on the control topic; true if it is newer than all others."""
        if self.announced is not None and message.version <= self.announced:
            return False
        self.announced = message.version
        return True

    def to_announce(self) -> StepReport | None:
        """The report whose weights should be announced now, or none."""
        if self.latest is None or (self.announced is not None and self.latest.version <= self.announced):
            return None
        return self.latest
