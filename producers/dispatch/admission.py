"""Admission by staleness: how many groups may be in flight. Pure; knows no topics and no workers.

A group is complete when all its samples are on the topic. Let n be the groups admitted and not ended untrained, B
groups_per_step and S max_staleness. Every step trains exactly B of them. The trainer takes complete groups in the order
of admission, oldest first; or in another order that leaves every complete group a place by its last step
(``ingest.sampling``).

Invariants, each with a test of its name:
- no_consumed_token_is_older_than_max_staleness: a group with base version b is admitted only with n <= (b + S + 1) × B,
  itself included, and n stays within that as long as samples of the group are missing. So the step after version b + S
  cannot be completed without the group while it is incomplete. Once it is complete, later groups come after it, and
  earlier ones were among the n, so it is trained by that step. Hence a complete group does not limit admission. In
  another order: when the group becomes complete, every group that may need a place is among the n. So the steps up to
  b + S + 1 have places for all, and so has every later one; ingest keeps these places. If ingest does not
  (``ingest.passed_over = "skip"``, or a cap below S), only its own check keeps the bound, by skipping older groups.
- admission_never_deadlocks: when no group may be admitted, either a full step's groups are in flight, or newer
  weights are on their way to a worker. This depends on every admitted group being trained or skipped eventually.

If batches are fixed, each group is for one step from the start (``batches``), and the trainer waits for it instead of
taking a later one. So a group for step d is admitted only with d <= b + S + 1, and its late samples delay only that
step.

Two cases are left to the trainer's own check, which skips groups that have become too old. First, the trainer may read
later groups from other partitions before it reads a group's last sample, which is already on the topic. Second, a
resumed trainer may get past a group's bound by training groups that it had skipped before. Holding others back cannot
save such a group any more, so it no longer limits them.

The base version of a group is the lowest version number that can have sampled one of its tokens: the worker's version,
or the trainer's version as known here if that is lower. Trained groups are counted as version number ×
groups_per_step, which holds across trainer restarts.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamrl.schemas.errors import LifecycleError
from streamrl.schemas.identifiers import PolicyVersion

HISTORY_STEPS = 100
"""Most steps that a resumed trainer may go back, with the default settings: two checkpoints, 50 steps apart."""


@dataclass
class Batches:
    """The optimizer step of each group in flight, for modes that fix it when the group is admitted.

    Invariant batches_fill_in_order: a new group is for the lowest future step with fewer than B groups, so the next
    admitted group takes the place of one that ended untrained.

    ``size``: groups_per_step; ``current``: steps taken. A group that missed its step is for the next one.
    """

    size: int
    current: int = 0
    _due: dict[str, int] = field(default_factory=dict)
    _groups: Counter[int] = field(default_factory=Counter)

    def add(self, group_id: str, due_step: int) -> None:
        """Add a group in flight, also one that an older trainer had ended."""
        self.remove(group_id)
        self._due[group_id] = due_step
        self._groups[due_step] += 1

    def remove(self, group_id: str) -> None:
        """Remove a group that ended, trained or not."""
        if (due := self._due.pop(group_id, None)) is not None:
            self._groups[due] -= 1
            if not self._groups[due]:
                del self._groups[due]

    def due_step(self, group_id: str) -> int:
        """The step that trains this group if it is complete in time."""
        return max(self._due[group_id], self.current + 1)

    def next_due(self) -> int:
        """The step that the next new group is for."""
        # Steps up to s have (s - current) × B places. The group's step is the first s with one left.
        step, taken = self.current + 1, self._taken(self.current + 1)
        while taken >= (step - self.current) * self.size:
            step += 1
            taken += self._groups[step]
        return step

    def room(self, last: int) -> int:
        """How many more groups the steps up to ``last`` can take.

        After a resume a later step may have too many groups. An earlier step still gets its missing groups, because the
        trainer waits for them.
        """
        # For each step: places up to it less groups up to it. The maximum is taken, so that no step lacks groups.
        most, taken = 0, self._taken(self.current)
        for step in range(self.current + 1, last + 1):
            taken += self._groups[step]
            most = max(most, (step - self.current) * self.size - taken)
        return most

    def _taken(self, last: int) -> int:
        return sum(groups for due, groups in self._groups.items() if due <= last)


@dataclass(frozen=True, slots=True)
class _Ended:
    group_id: str
    base: PolicyVersion
    number: int
    due_step: int


class AdmissionLedger:
    """The groups in flight with their base versions, and the trainer's version.

    ``history_steps``: how many steps below its newest one a resumed trainer may start. Groups that ended are remembered
    for so many steps, because such a trainer reads them again and they are in flight again. If the trainer went back
    further, admission would allow too many groups.

    ``_missing``: base version numbers of the groups with samples missing; ``_missing_of``: how many have each number.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        *,
        has_fixed_batches: bool = False,
        history_steps: int = HISTORY_STEPS,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._batches = Batches(groups_per_step) if has_fixed_batches else None
        self._max_staleness = max_staleness
        self.history_steps = history_steps
        self._base: dict[str, PolicyVersion] = {}
        self._missing: dict[str, int] = {}
        self._missing_of: Counter[int] = Counter()
        # In the order in which they ended, the oldest first.
        self._ended: deque[_Ended] = deque()
        self.current: PolicyVersion | None = None
        self._origin = 0

    @property
    def lineage(self) -> int:
        """Lineage of the trainer's version; 0 before the first."""
        return 0 if self.current is None else self.current.lineage

    @property
    def in_flight(self) -> int:
        """Groups admitted and neither trained nor skipped."""
        return len(self._base)

    @property
    def oldest(self) -> int | None:
        """Lowest base version number in flight."""
        return min((base.number for base in self._base.values()), default=None)

    @property
    def oldest_missing(self) -> int | None:
        """Lowest base version number of the groups with samples missing; only these limit admission."""
        return min(self._missing_of, default=None)

    def is_in_flight(self, group_id: str) -> bool:
        """Whether the group was admitted and has not ended."""
        return group_id in self._base

    def is_trainable(self, group_id: str) -> bool:
        """Whether the next step may still train tokens of the group's base version."""
        base = self._base.get(group_id)
        return self.current is not None and base is not None and self.current.number < self._last_step(base.number)

    def room(self, held: PolicyVersion) -> int:
        """How many more groups may be admitted to a worker that holds this version."""
        if self.current is None:
            return 0
        base = self._base_of(held).number
        if self._batches is not None:
            return self._batches.room(self._last_step(base))
        # The bound must hold for every group with samples missing, so the oldest of them decides. If the trainer is
        # past a group's bound, holding others back cannot save the group: it counts as just within the bound.
        oldest = self.oldest_missing
        if oldest is not None:
            base = min(base, max(oldest, self.current.number - self._max_staleness))
        return max(0, self._limit(base) - self._admitted())

    def may_admit(self, held: PolicyVersion) -> bool:
        """Whether a new group may be admitted to a worker that holds this version."""
        return self.room(held) > 0

    @property
    def next_due(self) -> int:
        """The earliest step that may train the next new group; 0 for any."""
        return 0 if self._batches is None else self._batches.next_due()

    def admit(self, group_id: str, held: PolicyVersion) -> None:
        """Admit a new group, for the step ``next_due``.

        Raises:
            LifecycleError: the group is already in flight, or there is no room.
        """
        if group_id in self._base:
            raise LifecycleError(f"expected a new group to admit, got {group_id}, which is in flight")
        if not self.may_admit(held):
            raise LifecycleError(
                f"expected room for {group_id} at version {held}, got {self._admitted()} groups trained or in flight"
            )
        due_step = self.next_due
        self._base[group_id] = base = self._base_of(held)
        self._take_place(group_id, due_step)
        self._miss(group_id, base.number)

    def _take_place(self, group_id: str, due_step: int) -> None:
        if self._batches is not None:
            self._batches.add(group_id, due_step)

    def produced(self, group_id: str) -> None:
        """Note that every sample of a group is on the trajectories topic."""
        number = self._missing.pop(group_id, None)
        if number is not None:
            self._missing_of[number] -= 1
            if not self._missing_of[number]:
                del self._missing_of[number]

    def _miss(self, group_id: str, number: int) -> None:
        """Note that samples of a group with this base version number are missing."""
        self.produced(group_id)
        self._missing[group_id] = number
        self._missing_of[number] += 1

    def may_move(self, group_id: str, held: PolicyVersion) -> bool:
        """Whether a worker that holds this version may sample a group's missing samples."""
        if self.current is None or group_id not in self._base:
            return False
        base = self._base_of(held)
        if self._batches is not None:
            return self._batches.due_step(group_id) <= self._last_step(base.number)
        # Either no older than the group's base, or new enough that all groups are trained in time.
        return base.number >= self._base[group_id].number or self._admitted() <= self._limit(base.number)

    def move(self, group_id: str, held: PolicyVersion) -> None:
        """Note that another worker samples a group's missing samples.

        Raises:
            LifecycleError: the group is not in flight, or the worker's version is too old for it.
        """
        if not self.may_move(group_id, held):
            raise LifecycleError(f"expected a group in flight that version {held} may sample, got {group_id}")
        self._lower(group_id, self._base_of(held))

    def restore(self, group_id: str, held: PolicyVersion, due_step: int = 0) -> None:
        """Add a group that an earlier dispatcher admitted."""
        # A group may have been ordered more than once; the lowest version of its orders counts.
        base = self._base.setdefault(group_id, held)
        self._take_place(group_id, due_step)
        self._miss(group_id, base.number)
        self._lower(group_id, held)

    def is_undone(self, number: int, lineage: int) -> bool:
        """Whether the present trainer has undone what an older lineage did at this version number."""
        return 0 < lineage < self.lineage and number > self._origin

    def end(self, group_id: str, number: int) -> bool:
        """Remove a group that ended at this version number, trained or not; false if it was not in flight."""
        base = self._base.get(group_id)
        if base is not None:
            due_step = 0 if self._batches is None else self._batches.due_step(group_id)
            self._ended.append(_Ended(group_id, base, number, due_step))
        self._base.pop(group_id, None)
        if self._batches is not None:
            self._batches.remove(group_id)
        self.produced(group_id)
        return base is not None

    def remember_steps(self, steps: int) -> None:
        """Remember ended groups for at least so many steps, because a resumed trainer may go back so far."""
        self.history_steps = max(self.history_steps, steps)

    def advance(self, version: PolicyVersion, trained: Iterable[str]) -> bool:
        """Note that the trainer reached a version with these groups; false for a repeat or an orphaned lineage.

        A newer lineage with a lower number means that the trainer resumed. Groups that ended since then are in flight
        again, because it will read them again. They count as produced, because their samples are on the topic.
        """
        # A repeat, or a report of a trainer that was superseded.
        if self.current is not None and version <= self.current:
            return False
        if self.current is not None and version.lineage > self.current.lineage:
            self._rewind(version)
        # Everything that older lineages did above this number is undone (`is_undone`).
        if version.lineage > self.lineage:
            self._origin = version.number
        self.current = version
        for group_id in trained:
            self.end(group_id, version.number)
        if self._batches is not None:
            self._batches.current = version.number
        while self._ended and self._ended[0].number < version.number - self.history_steps:
            self._ended.popleft()
        return True

    def _rewind(self, version: PolicyVersion) -> None:
        kept = deque(ended for ended in self._ended if ended.number <= version.number)
        # The trainer will read these groups again. They do not limit admission: their samples are on the topic.
        for ended in self._ended:
            if ended.number > version.number:
                self._base[ended.group_id] = ended.base
                self._take_place(ended.group_id, ended.due_step)
        self._ended = kept
        # Versions of older lineages count as the new lineage's of the same number, at most its present one.
        for group_id, base in self._base.items():
            if base.lineage < version.lineage:
                self._set_base(group_id, PolicyVersion(version.lineage, min(base.number, version.number)))

    def _base_of(self, held: PolicyVersion) -> PolicyVersion:
        assert self.current is not None
        # A worker's version may be newer than the trainer's as known here. Then the lower number is safe.
        return PolicyVersion(held.lineage, min(held.number, self.current.number))

    def _lower(self, group_id: str, base: PolicyVersion) -> None:
        # Both workers may have sampled tokens of the group.
        known = self._base[group_id]
        self._set_base(group_id, PolicyVersion(min(known.lineage, base.lineage), min(known.number, base.number)))

    def _set_base(self, group_id: str, base: PolicyVersion) -> None:
        self._base[group_id] = base
        if group_id in self._missing:
            self._miss(group_id, base.number)

    def _admitted(self) -> int:
        """The invariant's n: groups that were trained, and groups in flight."""
        trained = 0 if self.current is None else self.current.number * self._groups_per_step
        return trained + len(self._base)

    def _limit(self, number: int) -> int:
        """(b + S + 1) × B: the most groups trained or in flight with one of base version b among them."""
        return self._last_step(number) * self._groups_per_step

    def _last_step(self, number: int) -> int:
        """The last step that may train tokens sampled with this version number."""
        return number + self._max_staleness + 1
