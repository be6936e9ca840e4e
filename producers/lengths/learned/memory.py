"""A bounded sample of what was observed, in which old observations fade out.

Once it is full, each new one replaces a random other (Aggarwal 2006), so that the chance to still be there halves with
every 0.69 × capacity further ones: a policy of long ago does not count, and no data set vanishes at once.
"""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from producers.lengths.learned.features import Row
from producers.lengths.learned.history import Levels


@dataclass(frozen=True, slots=True)
class Observations:
    """``rows`` float32 [N, F]; ``level`` and ``length`` float32 [N]; ``censored`` bool [N]; ``dataset`` int64 [N].

    Data sets are numbered as they came.
    """

    rows: NDArray[np.float32]
    level: NDArray[np.float32]
    length: NDArray[np.float32]
    censored: NDArray[np.bool_]
    dataset: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


class Memory:
    """At most ``capacity`` observations."""

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
        """Note one; when full, a random other one leaves. A level that is not settled yet is NaN."""
        place = self._size if self._size < self._capacity else self._random.randrange(self._capacity)
        self._size = max(self._size, place + 1)
        self._all.rows[place] = row
        self._all.level[place] = level
        self._all.length[place] = length
        self._all.censored[place] = censored
        self._all.dataset[place] = self._number_of.setdefault(dataset, len(self._number_of))

    def snapshot(self, levels: Levels) -> Observations:
        """A copy that another thread may read; where no level had settled, with the level of now."""
        held = slice(0, self._size)
        dataset = self._all.dataset[held].copy()
        level = self._all.level[held].copy()
        now = np.array([levels.of(name) for name in self._number_of], np.float32)
        unsettled = np.isnan(level)
        level[unsettled] = now[dataset[unsettled]]
        return Observations(
            rows=self._all.rows[held].copy(),
            level=level,
            length=self._all.length[held].copy(),
            censored=self._all.censored[held].copy(),
            dataset=dataset,
        )
