"""Which of the whole groups that are held a step takes next, where that is not the oldest. Pure.

Of a group whose oldest token was sampled by version o, step o + S + 1 is the last that may train it (S: the staleness
bound). Admission lets it become whole only while all groups that are trained or under way fit into the steps up to that
one. So at that moment the steps up to any last step have places for all whole groups that need one by then: the
processor-demand criterion of earliest-deadline-first scheduling (Baruah, Rosier, Howell 1990), with places for time.
``Window`` keeps to it by what it hands out, in whatever order it would like to. Invariants, each with a test of its
name:
- what_goes_in_comes_out_once;
- every_whole_group_is_handed_out_by_its_last_step, with ``keeps_places``, as long as there were places for all;
- what_no_step_may_train_comes_out_first, for its reader to skip it: none stays in the window for ever.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import fmean
from typing import Generic, TypeVar

from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.ingest.filters import oldest_version
from streamrl.consumers.ingest.groups import ReadyGroups
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.import_path import load_function
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Trajectory

T = TypeVar("T")
Preference = tuple[float | str, ...]
"""The smallest goes first. It ends in a group's name, so that equal ones do not depend on the order of arrival."""
Prefer = Callable[[Group, int], Preference]
"""Of a group and the version number of its oldest token."""
Priority = Callable[[Sequence[float], Sequence[Trajectory]], float]
"""Of a group's weighted rewards and its trajectories, one each: the largest goes first. It must be a pure function."""


@dataclass
class Window(Generic[T]):
    """``size``: places of a step. ``keeps_places``: what others are preferred to is handed out while a step may train
    it; else only once none may.
    """

    size: int
    keeps_places: bool
    _by_last_step: dict[int, list[tuple[Preference, int, T]]] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __bool__(self) -> bool:
        return bool(self._by_last_step)

    def push(self, item: T, last_step: int, preference: Preference) -> None:
        """A group became whole."""
        heappush(self._by_last_step.setdefault(last_step, []), (preference, next(self._serial), item))

    def pop(self, step: int, places: int) -> T:
        """The next one, of at least one, for ``step``, of which so many ``places`` are left to be filled.

        One whose last step is over goes before all others.
        """
        earliest = min(self._by_last_step)
        if earliest >= step:
            horizon = self._full_step(step, places) if self.keeps_places else math.inf
            heads = [(heap[0][:2], last) for last, heap in self._by_last_step.items() if last <= horizon]
            _, earliest = min(heads)
        heap = self._by_last_step[earliest]
        *_, item = heappop(heap)
        if not heap:
            del self._by_last_step[earliest]
        return item

    def _full_step(self, step: int, places: int) -> float:
        """The first step up to which every place is needed; any other group than those for them would cost one its own.

        Places up to step d: ``places`` + (d - ``step``) x size.
        """
        needed = 0
        # Between two last steps the need is the same and the places are more: only last steps have to be looked at.
        for last in sorted(self._by_last_step):
            needed += len(self._by_last_step[last])
            if needed >= places + (last - step) * self.size:
                return last
        return math.inf


@dataclass
class SampledGroups:
    """A window of closed, usable groups, as ``ReadyGroups`` is one. ``step``: number of the step to come."""

    step: Callable[[], int]
    max_staleness: int
    prefer: Prefer
    window: Window[Group]

    def __bool__(self) -> bool:
        """Whether there is a group."""
        return bool(self.window)

    def push(self, group: Group) -> None:
        """A group was closed.

        Raises:
            SettingsError: a user's own priority gives no number for it.
        """
        oldest = min(oldest_version(sample.trajectory) for sample in group.samples)
        self.window.push(group, oldest + self.max_staleness + 1, self.prefer(group, oldest))

    def pop(self, places: int | None = None) -> Group:
        """The next group; there must be one. ``places``: of the step to come, that are left; None: all."""
        return self.window.pop(self.step(), self.window.size if places is None else places)


def open_window(
    loop: LoopSettings, settings: IngestSettings, step: Callable[[], int], *, may_choose: bool = True
) -> ReadyGroups | SampledGroups:
    """What holds whole groups until a step takes them; oldest first unless it ``may_choose``.

    Raises:
        SettingsError: a user's own priority cannot be imported.
    """
    if not (may_choose and settings.chooses(loop)):
        return ReadyGroups(step)
    prefer = freshest if settings.sampling == "freshest" else by_priority(settings.priority)
    window = Window[Group](loop.groups_per_step, settings.passed_over == "train")
    return SampledGroups(step, loop.staleness_bound, prefer, window)


def freshest(group: Group, oldest: int) -> Preference:
    """The newest oldest token first, of these what was ordered last."""
    return -oldest, -group.created_at, group.group_id


def by_priority(name: str) -> Prefer:
    """The largest priority first, of equal ones the oldest. ``name``: of a built-in one, or an import path.

    Raises:
        SettingsError: it cannot be imported.
    """
    function = PRIORITIES.get(name) or load_function(name)

    def prefer(group: Group, oldest: int) -> Preference:
        rewards = tuple(sample.reward for sample in group.samples)
        try:
            value = float(function(rewards, tuple(sample.trajectory for sample in group.samples)))
        except Exception as error:  # a user's function may raise anything
            raise SettingsError(_no_number(name, group, f"{type(error).__name__}: {error}")) from error
        if not math.isfinite(value):
            raise SettingsError(_no_number(name, group, str(value)))
        return -value, group.created_at, group.group_id

    return prefer


def absolute_advantage(rewards: Sequence[float], trajectories: Sequence[Trajectory]) -> float:
    """Mean of |r - mean r| over a group: the size of its advantages before they are scaled.

    What a temporal-difference error is to prioritized experience replay (arXiv 1511.05952); 0 where all earned
    the same.
    """
    mean = fmean(rewards)
    return fmean(abs(reward - mean) for reward in rewards)


PRIORITIES: dict[str, Priority] = {"absolute_advantage": absolute_advantage}
"""The built-in ones by name."""


def _no_number(name: str, group: Group, got: str) -> str:
    return (
        f"expected ingest.priority = {name!r} to give a finite number for group {group.group_id}, got {got}; mend the "
        'function, or set ingest.sampling = "oldest"'
    )
