"""Assembles groups. A group is complete when every sample is accounted for; no time-out closes it.

A sample that cannot be delivered gets a record that says so: from a worker for a prompt that it cannot sample, from the
dispatcher for a sample that no worker delivered. So every group becomes complete, except one whose order expired, which
the dispatcher no longer knows. Such a group is closed once training is so far that nothing can still wait for it.

Invariants:
- a_sample_is_in_one_group_once: each added sample leaves in exactly one ``ClosedGroup``;
- a_group_for_a_later_step_waits_for_it: with fixed batches, a group for a later step is not handed out earlier.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.schemas.identifiers import make_trajectory_id
from streamrl.schemas.reports import RecordRef, SkipReason
from streamrl.schemas.trajectories import Trajectory

OUTDATED = frozenset({SkipReason.STALE, SkipReason.TASK_CHANGED})
"""Reasons of one sample for which its whole group is skipped: too old, or sampled for another task."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record that is not trained, and the reason."""

    ref: RecordRef
    reason: SkipReason
    detail: str


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A closed group: its usable samples, the rejected ones, and the number of samples ``wanted``.

    ``position``: of its prompt in the prompt source.
    """

    group: Group
    rejections: tuple[Rejection, ...]
    wanted: int
    position: int = 0

    @property
    def missing(self) -> int:
        """Number of samples that never arrived."""
        return self.wanted - len(self.group.samples) - len(self.rejections)

    @property
    def shortfall(self) -> str:
        """A message that says how many samples the group has."""
        return f"{len(self.group.samples)} usable samples of {self.wanted}, {self.missing} never arrived"

    @property
    def is_usable(self) -> bool:
        """Whether the group has samples to compare; a group ordered with one sample needs only that one."""
        # A single sample of many is its own mean: its advantage would be 0.
        return len(self.group.samples) >= min(2, self.wanted)

    @property
    def outdated(self) -> Rejection | None:
        """A sample that was outdated when it was read, if there is one: then the whole group is skipped like it."""
        # Long completions are the first to be too old. A baseline over the rest would be biased towards short ones.
        return next((rejection for rejection in self.rejections if rejection.reason in OUTDATED), None)


@dataclass(slots=True)
class _OpenGroup:
    """A group under assembly: usable and rejected samples by their index."""

    wanted: int
    created_at: float
    position: int
    admitted: int  # highest version number that a worker had when samples of the group were ordered
    samples: dict[int, Sample] = field(default_factory=dict)
    rejections: dict[int, Rejection] = field(default_factory=dict)


class GroupAssembler:
    """Groups under assembly. Closed groups are in the ledger."""

    def __init__(self) -> None:
        self.open: dict[str, _OpenGroup] = {}

    def objection(self, trajectory: Trajectory) -> tuple[SkipReason, str] | None:
        """Why this sample cannot belong to its group; None if it can."""
        group_id, index, wanted = trajectory.group_id, trajectory.sample_index, trajectory.num_generations
        if trajectory.trajectory_id != (name := make_trajectory_id(group_id, index)):
            return SkipReason.POISON, f"expected sample {index} of {group_id} to be named {name}"
        entry = self.open.get(group_id)
        if index >= wanted or (entry is not None and entry.wanted != wanted):
            known = wanted if entry is None else entry.wanted
            return SkipReason.POISON, f"expected a sample of {known} in {group_id}, got sample {index} of {wanted}"
        if entry is not None and (index in entry.samples or index in entry.rejections):
            return (
                SkipReason.DUPLICATE,
                f"accepted before; this is attempt {trajectory.attempt}, {trajectory.worker_id}'s",
            )
        return None

    def add(self, trajectory: Trajectory, outcome: Sample | Rejection) -> ClosedGroup | None:
        """Add a sample that has no objection, usable or rejected; returns the group if it is now complete."""
        created, position = trajectory.created_at, trajectory.position
        admitted = trajectory.admitted_version.number
        fresh = _OpenGroup(trajectory.num_generations, created, position, admitted)
        entry = self.open.setdefault(trajectory.group_id, fresh)
        # Samples of a group may come from several attempts. The group's age is that of the first, in any arrival order.
        entry.created_at = min(entry.created_at, created)
        entry.position = max(entry.position, position)
        entry.admitted = max(entry.admitted, admitted)
        if isinstance(outcome, Rejection):
            entry.rejections[trajectory.sample_index] = outcome
        else:
            entry.samples[trajectory.sample_index] = outcome
        whole = len(entry.samples) + len(entry.rejections) == entry.wanted
        return self._close(trajectory.group_id) if whole else None

    def close_outdated(self, number: int) -> list[ClosedGroup]:
        """Close the groups whose samples were all ordered from workers with versions below this number."""
        # Collected first, because closing removes groups from the dict.
        outdated = [group_id for group_id, entry in self.open.items() if entry.admitted < number]
        return [self._close(group_id) for group_id in outdated]

    def _close(self, group_id: str) -> ClosedGroup:
        entry = self.open.pop(group_id)
        samples = tuple(entry.samples[index] for index in sorted(entry.samples))
        rejections = tuple(entry.rejections[index] for index in sorted(entry.rejections))
        return ClosedGroup(Group(group_id, entry.created_at, samples), rejections, entry.wanted, entry.position)


@dataclass
class ReadyGroups:
    """Closed, usable groups in the order of their due steps, and by age within a step, the oldest first.

    ``step``: gives the number of the next step.
    """

    step: Callable[[], int]
    _groups: list[tuple[int, float, str, int, Group]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __bool__(self) -> bool:
        """Whether there is a group that the next step may train."""
        # The head of the heap has the smallest due step: if it must wait, all groups must.
        return bool(self._groups) and self._groups[0][0] <= self.step()

    def push(self, group: Group) -> None:
        """Add a closed group."""
        # The id breaks ties, and the serial number breaks those of one id, because groups cannot be compared.
        entry = (group.due_step, group.created_at, group.group_id, next(self._serial), group)
        heapq.heappush(self._groups, entry)

    def pop(self, places: int | None = None) -> Group:
        """Remove and return the next group; there must be one. ``places`` is ignored: this order reserves no places."""
        return heapq.heappop(self._groups)[-1]
