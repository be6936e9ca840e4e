"""Chooses which complete group a step takes next, if that is not the oldest. Pure.

If version o sampled a group's oldest token, step o + S + 1 is the last that may train the group (S: the staleness
bound). Admission lets a group become complete only while all groups that are trained or under way fit into the steps up
to that one. So for every last step, the steps up to it have places for all complete groups that need one by then. This
is the processor-demand criterion of earliest-deadline-first scheduling (Baruah, Rosier, Howell 1990), with places for
time. ``Window`` keeps the criterion true, for any order of preference. Invariants, each with a test of its name:
- each_group_is_handed_out_once;
- every_complete_group_is_handed_out_by_its_last_step: with ``keeps_places``, if there were places for all at first;
- expired_groups_are_handed_out_first: the reader skips them, so none stays in the window for ever.
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
"""Sort key of a group: the smallest goes first. It ends in the group's id, so ties do not depend on arrival order."""
Prefer = Callable[[Group, int], Preference]
"""Maps a group and the version number of its oldest token to its preference."""
Priority = Callable[[Sequence[float], Sequence[Trajectory]], float]
"""Maps a group's weighted rewards and its trajectories, in the same order, to a number: the largest goes first. It must
be a pure function."""


@dataclass
class Window(Generic[T]):
    """Complete groups by their last step and preference.

    ``size``: places of a step. ``keeps_places``: a group that is not preferred still gets a place in a step that may
    train it. Otherwise it may be handed out only after its last step.
    """

    size: int
    keeps_places: bool
    _by_last_step: dict[int, list[tuple[Preference, int, T]]] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __bool__(self) -> bool:
        return bool(self._by_last_step)

    def push(self, item: T, last_step: int, preference: Preference) -> None:
        """Add a complete group."""
        heappush(self._by_last_step.setdefault(last_step, []), (preference, next(self._serial), item))

    def pop(self, step: int, places: int) -> T:
        """Remove and return the next group for ``step``, which has ``places`` left; the window must not be empty.

        Groups whose last step is over go before all others.
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
        """The first step up to which every place is needed; infinity if there is none.

        Taking a group with a later last step would then cost one of these groups its place. Places up to step d:
        ``places`` + (d - ``step``) x size.
        """
        needed = 0
        # Between two last steps the need stays the same and the places grow, so only last steps must be checked.
        for last in sorted(self._by_last_step):
            needed += len(self._by_last_step[last])
            if needed >= places + (last - step) * self.size:
                return last
        return math.inf


@dataclass
class SampledGroups:
    """Closed, usable groups by preference, instead of ``ReadyGroups``. ``step``: gives the number of the next step."""

    step: Callable[[], int]
    max_staleness: int
    prefer: Prefer
    window: Window[Group]

    def __bool__(self) -> bool:
        """Whether there is a group."""
        return bool(self.window)

    def push(self, group: Group) -> None:
        """Add a closed group.

        Raises:
            SettingsError: a user's own priority function gives no finite number for it.
        """
        oldest = min(oldest_version(sample.trajectory) for sample in group.samples)
        self.window.push(group, oldest + self.max_staleness + 1, self.prefer(group, oldest))

    def pop(self, places: int | None = None) -> Group:
        """Remove and return the next group; there must be one. ``places``: those left in the next step; None: all."""
        return self.window.pop(self.step(), self.window.size if places is None else places)


def open_window(
    loop: LoopSettings, settings: IngestSettings, step: Callable[[], int], *, may_choose: bool = True
) -> ReadyGroups | SampledGroups:
    """The container of complete groups; oldest first unless it ``may_choose`` and the settings say otherwise.

    Raises:
        SettingsError: a user's own priority function cannot be imported.
    """
    if not (may_choose and settings.chooses(loop)):
        return ReadyGroups(step)
    prefer = freshest if settings.sampling == "freshest" else by_priority(settings.sampling)
    window = Window[Group](loop.groups_per_step, settings.passed_over == "train")
    return SampledGroups(step, loop.staleness_bound, prefer, window)


def freshest(group: Group, oldest: int) -> Preference:
    """Prefers the group whose oldest token is the newest; among equal ones, the group ordered last."""
    return -oldest, -group.created_at, group.group_id


def by_priority(name: str) -> Prefer:
    """Prefers the largest priority; among equal ones, the oldest group. ``name``: built-in, or an import path.

    Raises:
        SettingsError: the function cannot be imported.
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

    It plays the role of the temporal-difference error in prioritized experience replay (arXiv 1511.05952). 0 if all
    rewards are equal.
    """
    mean = fmean(rewards)
    return fmean(abs(reward - mean) for reward in rewards)


PRIORITIES: dict[str, Priority] = {"absolute_advantage": absolute_advantage}
"""The built-in priority functions by name."""


def _no_number(name: str, group: Group, got: str) -> str:
    return (
        f"expected ingest.sampling = {name!r} to give a finite number for group {group.group_id}, got {got}; correct "
        'the function, or set it to "oldest"'
    )
