"""Admission by staleness: how many groups may be under way. Pure; knows no topics and no workers.

Let n be the groups admitted and not ended untrained, B groups_per_step and S max_staleness. Every step trains exactly
B of them, and the trainer takes whole groups oldest first, in the order of admission; or in another one that leaves
every whole group a place by its last step (``ingest.sampling``).

Invariants, each with a test of its name:
- no_consumed_token_is_older_than_max_staleness: a group with base version b is admitted only with n <= (b + S + 1) × B,
  itself included, and n stays within that as long as samples of it are missing. So the step after version b + S cannot
  be completed without it while it is missing. From when it is whole, later groups come behind it, and those before it
  were among the n; it is trained by that step. Hence a whole group holds no others back. In another order: when it
  becomes whole, every group that may need a place is among the n, so the steps up to b + S + 1 have places for all, and
  so has every later one; ingest keeps them. Where it does not (``ingest.passed_over = "skip"``, or a cap below S), its
  own check alone holds the bound, by throwing away what is beyond it.
- admission_never_deadlocks: when nothing may be admitted, either a whole step's groups are in flight, or newer
  weights are on their way to a worker. (It rests on every admitted group being trained or skipped in the end.)

Where batches are fixed, each group is for one step from the start (``batches``), and the trainer waits for it instead
of taking a later one. So a group for step d is admitted only with d <= b + S + 1, and however late its samples come,
they hold nobody back but that step.

Two cases are left to the trainer's own check, which skips what has become too old. Between the moment at which the last
sample is on the topic and the moment at which the trainer has read it, it may have read later groups of other
partitions. And a resumed trainer may get past a group's bound, by training groups that it had skipped before: holding
others back cannot save such a group any more, so it no longer limits them.

The base version of a group is the lowest version number that can have sampled a token of it: what the worker held,
or the trainer's number as known here if that is lower. Trained groups are counted as version number ×
groups_per_step, which holds across trainer restarts.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamrl.schemas.errors import LifecycleError
from streamrl.schemas.identifiers import PolicyVersion

HISTORY_STEPS = 100
"""How many steps a trainer may fall back on resume, with the default settings: two checkpoints, 50 steps apart."""


@dataclass
class Batches:
    """Which optimizer step each group in flight is for, where that is settled when it is admitted.

    Invariant batches_fill_in_order: a new group is for the lowest step to come that has fewer than B of them, so the
    place of a group that ended untrained is taken by the next one that is admitted.

    ``size``: groups_per_step; ``current``: steps taken. A group that outlasted its step is for the next one.
    """

    size: int
    current: int = 0
    _due: dict[str, int] = field(default_factory=dict)
    _groups: Counter[int] = field(default_factory=Counter)

    def add(self, group_id: str, due_step: int) -> None:
        """A group is in flight; one that an older trainer had ended may be so again."""
        self.remove(group_id)
        self._due[group_id] = due_step
        self._groups[due_step] += 1

    def remove(self, group_id: str) -> None:
        """It ended, trained or not."""
        if (due := self._due.pop(group_id, None)) is not None:
            self._groups[due] -= 1
            if not self._groups[due]:
                del self._groups[due]

    def due_step(self, group_id: str) -> int:
        """The step that trains this group if nothing keeps it."""
        return max(self._due[group_id], self.current + 1)

    def next_due(self) -> int:
        """The step that the next new group is for."""
        # Up to step s there are (s - current) × B places: the first step that leaves one is the group's.
        step, taken = self.current + 1, self._taken(self.current + 1)
        while taken >= (step - self.current) * self.size:
            step += 1
            taken += self._groups[step]
        return step

    def room(self, last: int) -> int:
        """How many more groups the steps up to ``last`` can take.

        After a resume a later step may have too many. Then an earlier one still gets what it lacks: the trainer waits.
        """
        # Places up to a step less the groups for it and those before; the most of all steps, so that none goes short.
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

    ``history_steps``: how far below its newest step a resumed trainer may begin, so for how long a group that ended is
    remembered: it is in flight again for a trainer that will read it again. Admission would allow too many groups if
    the trainer fell back further than that.

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
        # In the order in which they ended, the oldest on the left.
        self._ended: deque[_Ended] = deque()
        self.current: PolicyVersion | None = None
        self._origin = 0

    @property
    def lineage(self) -> int:
        """Of the trainer's version; 0 before the first."""
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
        """Lowest base version number of the groups with samples missing; only these hold others back."""
        return min(self._missing_of, default=None)

    def is_in_flight(self, group_id: str) -> bool:
        """Whether the group was admitted and has not ended."""
        return group_id in self._base

    def is_trainable(self, group_id: str) -> bool:
        """Whether the next step may train tokens of the oldest version that had a part in a group."""
        base = self._base.get(group_id)
        return self.current is not None and base is not None and self.current.number < self._last_step(base.number)

    def room(self, held: PolicyVersion) -> int:
        """How many more groups may be admitted to a worker that holds this version."""
        if self.current is None:
            return 0
        base = self._base_of(held).number
        if self._batches is not None:
            return self._batches.room(self._last_step(base))
        # The bound must hold for every group with samples missing, so the oldest of them decides. One whose bound the
        # trainer has got past cannot be saved by holding others back, so it counts as one that is just within it.
        oldest = self.oldest_missing
        if oldest is not None:
            base = min(base, max(oldest, self.current.number - self._max_staleness))
        return max(0, self._limit(base) - self._under_way())

    def may_admit(self, held: PolicyVersion) -> bool:
        """Whether a new group may be admitted to a worker that holds this version."""
        return self.room(held) > 0

    @property
    def next_due(self) -> int:
        """The earliest step that may train the next new group; 0 for any."""
        return 0 if self._batches is None else self._batches.next_due()

    def admit(self, group_id: str, held: PolicyVersion) -> None:
        """Take a new group into account, for the step ``next_due``.

        Raises:
            LifecycleError: it is in flight already, or there is no room.
        """
        if group_id in self._base:
            raise LifecycleError(f"expected a new group to admit, got {group_id}, which is in flight")
        if not self.may_admit(held):
            raise LifecycleError(f"expected room for {group_id} at version {held}, got {self._under_way()} under way")
        due_step = self.next_due
        self._base[group_id] = base = self._base_of(held)
        self._take_place(group_id, due_step)
        self._miss(group_id, base.number)

    def _take_place(self, group_id: str, due_step: int) -> None:
        if self._batches is not None:
            self._batches.add(group_id, due_step)

    def produced(self, group_id: str) -> None:
        """Every sample of a group is on the trajectories topic."""
        number = self._missing.pop(group_id, None)
        if number is not None:
            self._missing_of[number] -= 1
            if not self._missing_of[number]:
                del self._missing_of[number]

    def _miss(self, group_id: str, number: int) -> None:
        """Samples of it are missing, and it began at this version number."""
        self.produced(group_id)
        self._missing[group_id] = number
        self._missing_of[number] += 1

    def may_move(self, group_id: str, held: PolicyVersion) -> bool:
        """Whether a worker that holds this version may sample what is missing of a group."""
        if self.current is None or group_id not in self._base:
            return False
        base = self._base_of(held)
        if self._batches is not None:
            return self._batches.due_step(group_id) <= self._last_step(base.number)
        # No older than the group is anyway; or young enough that all that is under way is trained in time.
        return base.number >= self._base[group_id].number or self._under_way() <= self._limit(base.number)

    def move(self, group_id: str, held: PolicyVersion) -> None:
        """Another worker samples what is missing of a group.

        Raises:
            LifecycleError: the group is not in flight, or the worker's version is too old for it.
        """
        if not self.may_move(group_id, held):
            raise LifecycleError(f"expected a group in flight that version {held} may sample, got {group_id}")
        self._lower(group_id, self._base_of(held))

    def restore(self, group_id: str, held: PolicyVersion, due_step: int = 0) -> None:
        """Take a group into account that was admitted by an earlier dispatcher."""
        # A group may have been ordered more than once; the lowest version that had a part in it counts.
        base = self._base.setdefault(group_id, held)
        self._take_place(group_id, due_step)
        self._miss(group_id, base.number)
        self._lower(group_id, held)

    def is_undone(self, number: int, lineage: int) -> bool:
        """Whether an older trainer said something at this number that the present one does not know of."""
        return 0 < lineage < self.lineage and number > self._origin

    def end(self, group_id: str, number: int) -> bool:
        """A group ended at this version number, trained or not; false if it was not in flight."""
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
        """A resumed trainer may begin so far below its newest step, if not further."""
        self.history_steps = max(self.history_steps, steps)

    def advance(self, version: PolicyVersion, trained: Iterable[str]) -> bool:
        """The trainer reached a version with these groups; false for a repeat or an orphaned lineage.

        A newer lineage with a lower number means that the trainer resumed: the groups that ended since then are in
        flight again, because it will read them again. They count as produced: what it had is on the topic.
        """
        # A repeat, or a trainer that another has replaced.
        if self.current is not None and version <= self.current:
            return False
        if self.current is not None and version.lineage > self.current.lineage:
            self._rewind(version)
        # What older lineages said above this number is undone (`is_undone`).
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
        # The trainer will read them again. They hold nobody back: their samples are on the topic.
        for ended in self._ended:
            if ended.number > version.number:
                self._base[ended.group_id] = ended.base
                self._take_place(ended.group_id, ended.due_step)
        self._ended = kept
        # Weights of older lineages count as the new one's of the same number, as far as it has got.
        for group_id, base in self._base.items():
            if base.lineage < version.lineage:
                self._set_base(group_id, PolicyVersion(version.lineage, min(base.number, version.number)))

    def _base_of(self, held: PolicyVersion) -> PolicyVersion:
        assert self.current is not None
        # A worker may be ahead of what we know of the trainer; then the lower number is the safe one.
        return PolicyVersion(held.lineage, min(held.number, self.current.number))

    def _lower(self, group_id: str, base: PolicyVersion) -> None:
        # Both workers may have sampled tokens of it.
        known = self._base[group_id]
        self._set_base(group_id, PolicyVersion(min(known.lineage, base.lineage), min(known.number, base.number)))

    def _set_base(self, group_id: str, base: PolicyVersion) -> None:
        self._base[group_id] = base
        if group_id in self._missing:
            self._miss(group_id, base.number)

    def _under_way(self) -> int:
        """N of the invariant: groups that were trained, and those in flight."""
        trained = 0 if self.current is None else self.current.number * self._groups_per_step
        return trained + len(self._base)

    def _limit(self, number: int) -> int:
        """(b + S + 1) × B: as many groups may be under way with one of base version b among them."""
        return self._last_step(number) * self._groups_per_step

    def _last_step(self, number: int) -> int:
        """The last step that may train tokens sampled with this version number."""
        return number + self._max_staleness + 1
