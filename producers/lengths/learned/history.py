"""Statistics of earlier completions: the level of each data set, the history of each prompt, and a sample to fit to.

Log lengths are learned relative to the level of their data set. Which prompts have longer completions is a lasting
property of the prompts. The level changes with the policy, and is followed between two fits.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from streamrl.producers.lengths.learned.features import Row

SETTLED = 128
"""Completions of a data set after which its level is settled; until then the level is their mean."""
OWN_STEP, SHARED_STEP = 1 / 1024, 1 / 512
"""Change by one completion of its data set's level, and of the shared part of all levels. If a policy's lengths double,
the levels follow within 240 completions."""
MAX_PROMPTS = 65_536
RECENT = 32
"""Completions of a prompt over which its past is averaged."""
SLOPE_WINDOW = 1024
"""Completions over which a slope is fitted: each time that many are added, the weight of older ones falls by e."""
PRIOR, ENOUGH = 1.0, 4.0
"""Sum of squares with which a slope of 0 counts at first, and the sum from which on a fitted slope is trusted."""


@dataclass(slots=True)
class _Level:
    mean: float = 0.0
    count: int = 0


class DatasetLevels:
    """The level of log(length) by data set, and over all: level = own mean + the part that all levels share.

    Lengths that the model explains do not move the level, so a few long prompts in a row do not:

        error = log(length) - explained - level,    level += step × sign(error)

    A step has a fixed size. So the level settles where half of the completions are longer than predicted, regardless of
    how long the longest are.
    """

    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}
        self._all = _Level()
        self._shared = 0.0

    def count(self, dataset: str) -> int:
        """Completions seen of a data set."""
        level = self._levels.get(dataset)
        return 0 if level is None else level.count

    def of(self, dataset: str) -> float:
        """The data set's level; for an unknown data set the level over all."""
        return self._levels.get(dataset, self._all).mean + self._shared

    def add(self, dataset: str, length: int, explained: float | None = None) -> None:
        """Note a length in tokens; ``explained``: log length above the level that the model predicted, if any."""
        value = math.log(max(1, length))
        for level in (self._levels.setdefault(dataset, _Level()), self._all):
            # How far the completion was above the prediction of level and model.
            error = value - (explained or 0.0) - level.mean - self._shared
            level.count += 1
            # A mean over the first completions, then fixed steps.
            if level.count <= SETTLED or explained is None:
                level.mean += error / min(level.count, SETTLED)
            else:
                level.mean += math.copysign(OWN_STEP, error)
        # A policy that writes more does so for all data sets, so each of them moves the shared part.
        if explained is not None and self._levels[dataset].count > SETTLED:
            self._shared += math.copysign(SHARED_STEP, value - explained - self.of(dataset))

    def dump(self) -> dict[str, tuple[float, int]]:
        """Level and count by data set, for a file."""
        return {dataset: (self.of(dataset), level.count) for dataset, level in self._levels.items()}

    def load(self, dumped: Mapping[str, tuple[float, int]]) -> None:
        """Continue from dumped levels; levels of other data sets stay."""
        known = {**self.dump(), **dumped}
        # Dumped levels include the shared part.
        self._shared = 0.0
        self._levels = {dataset: _Level(mean, count) for dataset, (mean, count) in known.items()}
        total = sum(level.count for level in self._levels.values())
        mean = sum(level.mean * level.count for level in self._levels.values()) / max(1, total)
        self._all = _Level(mean, total)


@dataclass(slots=True)
class _PromptPast:
    count: int = 0
    mean: float = 0.0


@dataclass(slots=True)
class _DecayedSlope:
    """Least squares through the origin, decayed: the slope of outcome over past is Σ past × outcome / Σ past²."""

    product: float = 0.0
    square: float = PRIOR

    def add(self, past: float, outcome: float) -> None:
        keep = 1 - 1 / SLOPE_WINDOW
        self.product = self.product * keep + past * outcome
        self.square = self.square * keep + past * past


class PromptHistory:
    """For recent prompts, the distance of their completions from the model's prediction by the text.

    How much of the distance carries over to the next time is also learned, by how often the prompt was seen: all of it
    if lengths repeat, little if the samples of a prompt differ much.
    """

    def __init__(self, limit: int = MAX_PROMPTS) -> None:
        self._past: LRUCache[str, _PromptPast] = LRUCache(limit)
        self._slopes: dict[int, _DecayedSlope] = {}

    def __len__(self) -> int:
        return len(self._past)

    def recall(self, prompt_id: str) -> tuple[int, float]:
        """Completions seen of the prompt, and their mean distance from the model, in logarithms."""
        past = self._past.get(prompt_id)
        return (0, 0.0) if past is None else (past.count, past.mean)

    def effect(self, seen: tuple[int, float]) -> float:
        """The correction to the model's prediction for a prompt with this past, as ``recall`` returns it."""
        count, mean = seen
        # Prompts seen fewer times carry over less, so their slope is a safe guess while this class has few data.
        for often in range(count.bit_length(), 0, -1):
            slope = self._slopes.get(often)
            if slope is not None and slope.square >= ENOUGH:
                return mean * min(1.0, max(0.0, slope.product / slope.square))
        return 0.0

    def add(self, prompt_id: str, distance: float, seen: tuple[int, float]) -> None:
        """Note a completion's distance from the model; ``seen``: the prompt's past before its group."""
        # Before the past is changed: the slope is over pairs of the past at the prediction and the outcome. Prompts are
        # classed by how often they were seen: 1, 2-3, 4-7, …
        if seen[0]:
            self._slopes.setdefault(seen[0].bit_length(), _DecayedSlope()).add(seen[1], distance)
        past = self._past.setdefault(prompt_id, _PromptPast())
        past.count += 1
        # A plain mean of the first RECENT completions, then an exponential mean.
        past.mean += (distance - past.mean) / min(past.count, RECENT)


@dataclass(frozen=True, slots=True)
class Observations:
    """``rows`` float32 [N, F]; ``level`` and ``length`` float32 [N]; ``censored`` bool [N]; ``dataset`` int64 [N].

    Data sets are numbered in the order of their first completions.
    """

    rows: NDArray[np.float32]
    level: NDArray[np.float32]
    length: NDArray[np.float32]
    censored: NDArray[np.bool_]
    dataset: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


class Reservoir:
    """A sample of at most ``capacity`` observations, in which old ones fade out.

    When it is full, each new observation replaces a random one (Aggarwal 2006). An observation is still there after k
    further ones with probability (1 - 1 / capacity)^k, which halves with every 0.69 × capacity. So old policies lose
    their weight, and no data set vanishes at once.
    """

    def __init__(self, capacity: int, width: int, seed: int = 0) -> None:
        self._capacity = capacity
        self._random = random.Random(seed)
        self._size = 0
        self._number_of: dict[str, int] = {}
        self._all = Observations(
            rows=np.empty((capacity, width), np.float32),
            level=np.empty(capacity, np.float32),
            length=np.empty(capacity, np.float32),
            censored=np.empty(capacity, np.bool_),
            dataset=np.empty(capacity, np.int64),
        )

    def __len__(self) -> int:
        return self._size

    def add(self, row: Row, *, level: float, length: int, censored: bool, dataset: str) -> None:
        """Add an observation; when full, it replaces a random one. ``level``: NaN while it is not settled."""
        # Slots are filled in order, then replaced at random.
        slot = self._size if self._size < self._capacity else self._random.randrange(self._capacity)
        self._size = max(self._size, slot + 1)
        self._all.rows[slot] = row
        self._all.level[slot] = level
        self._all.length[slot] = length
        self._all.censored[slot] = censored
        self._all.dataset[slot] = self._number_of.setdefault(dataset, len(self._number_of))

    def snapshot(self, levels: DatasetLevels) -> Observations:
        """A copy that another thread may read. Levels that had not settled are replaced by the present ones."""
        held = slice(0, self._size)
        dataset = self._all.dataset[held].copy()
        level = self._all.level[held].copy()
        present = np.array([levels.of(name) for name in self._number_of], np.float32)
        unsettled = np.isnan(level)
        level[unsettled] = present[dataset[unsettled]]
        return Observations(
            rows=self._all.rows[held].copy(),
            level=level,
            length=self._all.length[held].copy(),
            censored=self._all.censored[held].copy(),
            dataset=dataset,
        )
