"""Keep a trajectory or skip it, given the trainer's version and the bound. Pure."""

from dataclasses import dataclass
from typing import Literal

from schemas.identifiers import PolicyVersion
from schemas.messages.reports import SkipReason
from schemas.messages.trajectories import Trajectory


@dataclass(frozen=True)
class StalenessRule:
    """``max_staleness`` in optimizer steps; ``orphan_lineage``: what becomes of samples of orphaned weights."""

    max_staleness: int
    orphan_lineage: Literal["train", "skip"]

    def verdict(self, trajectory: Trajectory, current: PolicyVersion) -> tuple[SkipReason, str] | None:
        """Why the trajectory must be skipped, or none if it may be trained."""
        age = staleness(trajectory, current)
        if age > self.max_staleness:
            return SkipReason.STALE, f"expected at most {self.max_staleness} steps of staleness, got {age}"
        if self.orphan_lineage == "skip" and is_orphan(trajectory, current):
            return SkipReason.ORPHAN_LINEAGE, f"sampled by {trajectory.newest_version}, trainer is at {current}"
        return None


def staleness(trajectory: Trajectory, current: PolicyVersion) -> int:
    """Optimizer steps between the oldest weights that sampled a token and the current ones, at least 0."""
    return max(0, current.number - trajectory.oldest_version.number)


def is_orphan(trajectory: Trajectory, current: PolicyVersion) -> bool:
    """Whether weights of an older lineage with a higher number, lost in a crash, sampled some of its tokens."""
    return any(
        span.version.lineage < current.lineage and span.version.number > current.number
        for span in trajectory.version_spans
    )
