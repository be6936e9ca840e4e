"""Keep a trajectory or skip it, given the trainer's version and the bound. Pure."""

from dataclasses import dataclass
from typing import Literal

from schemas.identifiers import PolicyVersion
from schemas.messages.reports import SkipReason
from schemas.messages.trajectories import Trajectory


@dataclass(frozen=True)
class StalenessRule:
    """``max_staleness`` in optimizer steps; ``orphan_lineage``: what becomes of samples of orphaned weights.

    ``origin``: the version with which this trainer started. Older lineages got past its number only after the
    checkpoint that it restored, so weights of theirs with a higher number are in no ancestry of the model.
    """

    max_staleness: int
    orphan_lineage: Literal["train", "skip"]
    origin: PolicyVersion

    def verdict(self, trajectory: Trajectory, current: PolicyVersion) -> tuple[SkipReason, str] | None:
        """Why the trajectory must be skipped, or none if it may be trained."""
        age = staleness(trajectory, current)
        if age > self.max_staleness:
            return SkipReason.STALE, f"expected at most {self.max_staleness} steps of staleness, got {age}"
        if self.orphan_lineage == "skip" and self.is_orphan(trajectory):
            return SkipReason.ORPHAN_LINEAGE, f"sampled by {trajectory.newest_version}, trainer is at {current}"
        return None

    def is_orphan(self, trajectory: Trajectory) -> bool:
        """Whether weights that were lost in a crash sampled some of its tokens."""
        lineage, number = self.origin
        return any(span.version.lineage < lineage and span.version.number > number for span in trajectory.version_spans)


def staleness(trajectory: Trajectory, current: PolicyVersion) -> int:
    """Optimizer steps between the oldest weights that sampled a token and the current ones, at least 0.

    Numbers are compared across lineages: a step is a step, whoever took it.
    """
    oldest = min((span.version.number for span in trajectory.version_spans), default=trajectory.admitted_version.number)
    return max(0, current.number - oldest)
