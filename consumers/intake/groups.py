"""Assembles groups: whole when every sample is accounted for, closed with what is there after a time-out. Pure.

Invariant a_sample_is_in_one_group_once: a sample leaves in exactly one ``Closed``, or is refused as late.
"""

from dataclasses import dataclass, field

from consumers.batching.samples import Group, Sample
from schemas.messages.trajectories import Trajectory

MIN_USABLE = 2
REMEMBERED = 100_000


@dataclass(slots=True)
class _Open:
    """A group under assembly: usable samples by index, indices that will never be usable."""

    wanted: int
    opened_at: float
    samples: dict[int, Sample] = field(default_factory=dict)
    unusable: set[int] = field(default_factory=set)

    @property
    def accounted(self) -> int:
        return len(self.samples) + len(self.unusable - self.samples.keys())


@dataclass(frozen=True, slots=True)
class Closed:
    """A group that is over; ``usable`` says whether it has enough samples to compare."""

    group: Group
    usable: bool
    detail: str


@dataclass
class GroupAssembler:
    """Groups under assembly by id; closed ones are remembered for a while, to refuse late samples."""

    timeout_s: float
    open: dict[str, _Open] = field(default_factory=dict)
    closed: dict[str, None] = field(default_factory=dict)

    def is_closed(self, group_id: str) -> bool:
        """Whether the group is over, so that a sample of it comes late."""
        return group_id in self.closed

    def add(self, sample: Sample, now: float) -> Closed | None:
        """Take a usable sample in; the group if it is whole now."""
        entry = self._entry(sample.trajectory, now)
        entry.samples[sample.trajectory.sample_index] = sample
        return self._close_if_whole(sample.trajectory.group_id, entry)

    def add_unusable(self, trajectory: Trajectory, now: float) -> Closed | None:
        """Count a sample that exists but cannot be trained; the group if it is whole now."""
        entry = self._entry(trajectory, now)
        entry.unusable.add(trajectory.sample_index)
        return self._close_if_whole(trajectory.group_id, entry)

    def expire(self, now: float) -> list[Closed]:
        """Close the groups whose time is over, oldest first."""
        late = [group_id for group_id, entry in self.open.items() if now - entry.opened_at >= self.timeout_s]
        return [self._close(group_id, f"closed after {self.timeout_s:g} s") for group_id in late]

    def _entry(self, trajectory: Trajectory, now: float) -> _Open:
        return self.open.setdefault(trajectory.group_id, _Open(trajectory.num_generations, now))

    def _close_if_whole(self, group_id: str, entry: _Open) -> Closed | None:
        return self._close(group_id, "whole") if entry.accounted >= entry.wanted else None

    def _close(self, group_id: str, why: str) -> Closed:
        entry = self.open.pop(group_id)
        self.closed[group_id] = None
        if len(self.closed) > REMEMBERED:
            del self.closed[next(iter(self.closed))]
        samples = tuple(entry.samples[index] for index in sorted(entry.samples))
        created = min((sample.trajectory.created_at for sample in samples), default=0.0)
        detail = f"{why} with {len(samples)} usable of {entry.wanted} samples"
        return Closed(Group(group_id, created, samples), len(samples) >= MIN_USABLE, detail)
