"""Assembles groups: whole when every sample is accounted for, closed with what is there after a time-out. Pure.

Invariant a_sample_is_in_one_group_once: what was added leaves in exactly one ``Closed``.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bus.port import Subscription
from consumers.batching.micro_batches import Group, Sample
from schemas.errors import BusError
from schemas.identifiers import make_trajectory_id
from schemas.reports import RecordRef, SkipReason
from schemas.trajectories import Trajectory

# Groups that are closed and usable, until the trainer takes them. Pure. Invariant
# a_group_for_a_later_step_waits_for_it: what fixed batches keep for a later step is not handed out before.


@dataclass
class ReadyGroups:
    """Those for the earliest step first, and of these the oldest. ``step``: number of the step to come."""

    step: Callable[[], int]
    _groups: list[tuple[int, float, str, Group]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is a group that the step to come may train."""
        return bool(self._groups) and self._groups[0][0] <= self.step()

    def add(self, group: Group) -> None:
        """A group was closed."""
        heapq.heappush(self._groups, (group.due_step, group.created_at, group.group_id, group))

    def take(self) -> Group:
        """The next group; there must be one."""
        return heapq.heappop(self._groups)[-1]


# The clock of group time-outs: it runs only while samples that are late could have been heard.

STALL_S = 5.0
"""Most of one round that counts: when this process stood still, nobody else was late."""
ASK_S = 1.0
"""After so long without a record the broker is asked whether it is there: its silence is not the workers'."""


@dataclass
class Patience:
    """``listened_s``: seconds in which everything on the topic was read, and more could have come."""

    clock: Callable[[], float]
    listened_s: float = 0.0
    _looked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._looked_at = self.clock()

    async def listen(self, subscription: Subscription, heard: int, *, caught_up: bool) -> None:
        """Count the time since the last look, after a read that brought so many records."""
        now = self.clock()
        silent_s = max(0.0, now - self._looked_at)
        if not heard and silent_s < ASK_S:
            return
        if caught_up and (heard or await _answers(subscription)):
            self.listened_s += min(silent_s, STALL_S)
        self._looked_at = now


async def _answers(subscription: Subscription) -> bool:
    try:
        await subscription.end_offsets()
    except BusError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that is not trained, and why."""

    ref: RecordRef
    reason: SkipReason
    detail: str


@dataclass(slots=True)
class _Open:
    """A group under assembly: usable and refused samples by their index."""

    wanted: int
    touched_at: float
    created_at: float
    position: int
    samples: dict[int, Sample] = field(default_factory=dict)
    refusals: dict[int, Refusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Closed:
    """A group that is over: its usable samples, the refused ones, and how many of ``wanted`` never came.

    ``position``: of its prompt in the prompt source.
    """

    group: Group
    refusals: tuple[Refusal, ...]
    wanted: int
    position: int = 0

    @property
    def missing(self) -> int:
        """Samples that never came."""
        return self.wanted - len(self.group.samples) - len(self.refusals)

    @property
    def shortfall(self) -> str:
        """What there is of it, in words."""
        return f"{len(self.group.samples)} usable samples of {self.wanted}, {self.missing} never came"

    @property
    def is_usable(self) -> bool:
        """Whether there are samples to compare; a group that was ordered with one sample needs no second."""
        return self.would_be_usable(len(self.group.samples))

    def would_be_usable(self, samples: int) -> bool:
        """Whether so many usable samples are enough."""
        return samples >= min(2, self.wanted)


@dataclass
class GroupAssembler:
    """Groups under assembly, least recently touched first; ``capacity`` closed ones are remembered by name."""

    timeout_s: float
    capacity: int
    open: dict[str, _Open] = field(default_factory=dict)
    closed: dict[str, None] = field(default_factory=dict)

    def is_closed(self, group_id: str) -> bool:
        """Whether the group is over, so that a sample of it comes late."""
        return group_id in self.closed

    def restore(self, trajectory_ids: Iterable[str]) -> None:
        """The groups of finished trajectories are over: all records of a group are finished together."""
        self.closed = dict.fromkeys(name.rpartition("/")[0] for name in trajectory_ids)

    def objection(self, trajectory: Trajectory) -> tuple[SkipReason, str] | None:
        """Why this sample cannot belong to its group, or none."""
        group_id, index, wanted = trajectory.group_id, trajectory.sample_index, trajectory.num_generations
        if trajectory.trajectory_id != (name := make_trajectory_id(group_id, index)):
            return SkipReason.POISON, f"expected sample {index} of {group_id} to be named {name}"
        entry = self.open.get(group_id)
        if index >= wanted or (entry is not None and entry.wanted != wanted):
            known = wanted if entry is None else entry.wanted
            return SkipReason.POISON, f"expected a sample of {known} in {group_id}, got sample {index} of {wanted}"
        if entry is not None and (index in entry.samples or index in entry.refusals):
            return SkipReason.DUPLICATE, "this sample of the group was accepted before"
        return None

    def add(self, trajectory: Trajectory, outcome: Sample | Refusal, now: float) -> Closed | None:
        """Take in a sample without objections, usable or refused; the group if that made it whole.

        ``now``: seconds on a clock that stands still while nothing can be read.
        """
        created, position = trajectory.created_at, trajectory.position
        entry = self.open.pop(trajectory.group_id, None) or _Open(trajectory.num_generations, now, created, position)
        entry.touched_at = now
        entry.created_at = min(entry.created_at, created)
        entry.position = max(entry.position, position)
        self.open[trajectory.group_id] = entry
        if isinstance(outcome, Refusal):
            entry.refusals[trajectory.sample_index] = outcome
        else:
            entry.samples[trajectory.sample_index] = outcome
        whole = len(entry.samples) + len(entry.refusals) == entry.wanted
        return self._close(trajectory.group_id) if whole else None

    def expire(self, now: float) -> list[Closed]:
        """Close the groups whose time is over."""
        late = []
        for group_id, entry in self.open.items():
            if now - entry.touched_at < self.timeout_s:
                break
            late.append(group_id)
        return [self._close(group_id) for group_id in late]

    def _close(self, group_id: str) -> Closed:
        entry = self.open.pop(group_id)
        self.closed[group_id] = None
        if len(self.closed) > self.capacity:
            del self.closed[next(iter(self.closed))]
        samples = tuple(entry.samples[index] for index in sorted(entry.samples))
        refusals = tuple(entry.refusals[index] for index in sorted(entry.refusals))
        return Closed(Group(group_id, entry.created_at, samples), refusals, entry.wanted, entry.position)
