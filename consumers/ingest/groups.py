"""Assembles groups: whole when every sample is accounted for. No clock closes one, however long a sibling takes.

Whoever cannot deliver a sample says so in a record of its own: a worker for a prompt that it cannot sample, the
dispatcher for what no worker delivered. So every group becomes whole, but for one that the dispatcher does not know any
more, because its order expired; that is closed once training has gone so far that nobody can have waited for it.

Invariants:
- a_sample_is_in_one_group_once: what was added leaves in exactly one ``ClosedGroup``;
- a_group_for_a_later_step_waits_for_it: what fixed batches keep for a later step is not handed out before.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.schemas.identifiers import make_trajectory_id
from streamrl.schemas.reports import RecordRef, SkipReason
from streamrl.schemas.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record that is not trained, and why."""

    ref: RecordRef
    reason: SkipReason
    detail: str


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A group that is over: its usable samples, the rejected ones, and how many of ``wanted`` never came.

    ``position``: of its prompt in the prompt source.
    """

    group: Group
    rejections: tuple[Rejection, ...]
    wanted: int
    position: int = 0

    @property
    def missing(self) -> int:
        """Samples that never came."""
        return self.wanted - len(self.group.samples) - len(self.rejections)

    @property
    def shortfall(self) -> str:
        """What there is of it, in words."""
        return f"{len(self.group.samples)} usable samples of {self.wanted}, {self.missing} never came"

    @property
    def is_usable(self) -> bool:
        """Whether there are samples to compare; a group that was ordered with one sample needs no second."""
        # One sample left of many is its own mean: its advantage would be 0.
        return len(self.group.samples) >= min(2, self.wanted)

    @property
    def stale(self) -> Rejection | None:
        """A sample that was too old when it was read, if there is one: the whole group ages out with it."""
        # Long completions are the first to be too old. A baseline over those that are left would lean to short ones.
        return next((rejection for rejection in self.rejections if rejection.reason is SkipReason.STALE), None)


@dataclass(slots=True)
class _OpenGroup:
    """A group under assembly: usable and rejected samples by their index."""

    wanted: int
    created_at: float
    position: int
    admitted: int  # highest version number that a worker had when samples of it were ordered
    samples: dict[int, Sample] = field(default_factory=dict)
    rejections: dict[int, Rejection] = field(default_factory=dict)


class GroupAssembler:
    """Groups under assembly. Those that were closed are known to the ledger."""

    def __init__(self) -> None:
        self.open: dict[str, _OpenGroup] = {}

    def objection(self, trajectory: Trajectory) -> tuple[SkipReason, str] | None:
        """Why this sample cannot belong to its group, or none."""
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
        """Take in a sample without objections, usable or rejected; the group if that made it whole."""
        created, position = trajectory.created_at, trajectory.position
        admitted = trajectory.admitted_version.number
        fresh = _OpenGroup(trajectory.num_generations, created, position, admitted)
        entry = self.open.setdefault(trajectory.group_id, fresh)
        # Samples of one group may be of several attempts: its age is that of the first, whichever came first here.
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
        """Close the groups of which nothing was ordered from a worker with weights of this version number or newer."""
        # Collected first: closing takes groups out of the dict that is walked here.
        over = [group_id for group_id, entry in self.open.items() if entry.admitted < number]
        return [self._close(group_id) for group_id in over]

    def _close(self, group_id: str) -> ClosedGroup:
        entry = self.open.pop(group_id)
        samples = tuple(entry.samples[index] for index in sorted(entry.samples))
        rejections = tuple(entry.rejections[index] for index in sorted(entry.rejections))
        return ClosedGroup(Group(group_id, entry.created_at, samples), rejections, entry.wanted, entry.position)


@dataclass
class ReadyGroups:
    """Closed, usable groups: those for the earliest step first, and of these the oldest.

    ``step``: number of the step to come.
    """

    step: Callable[[], int]
    _groups: list[tuple[int, float, str, int, Group]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __bool__(self) -> bool:
        """Whether there is a group that the step to come may train."""
        # The head of the heap has the smallest due step: if it must wait, all of them must.
        return bool(self._groups) and self._groups[0][0] <= self.step()

    def push(self, group: Group) -> None:
        """A group was closed."""
        # The id breaks ties, and the serial number those of one id: groups have no order.
        entry = (group.due_step, group.created_at, group.group_id, next(self._serial), group)
        heapq.heappush(self._groups, entry)

    def pop(self, places: int | None = None) -> Group:
        """The next group; there must be one. ``places`` of the step that are left: the oldest first needs none kept."""
        return heapq.heappop(self._groups)[-1]
