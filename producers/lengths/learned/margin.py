"""How far the upper estimates have to move so that they cover what they promise.

Every new group is predicted before any of its completions is known, so what is left over then is an honest residual.
The promised quantile of the recent ones is the margin (conformalised quantile regression: Romano, Patterson and
Candès 2019), by data set where enough are known. Recent only, so it follows a policy that changes.
"""

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 1024
ENOUGH = 128


class Residuals:
    """The last ``WINDOW`` of them, in order of arrival and of size."""

    def __init__(self) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, residual: float) -> None:
        """Note one; the oldest leaves when the window is full."""
        if len(self._arrived) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(residual)
        insort(self._sorted, residual)

    def quantile(self, share: float) -> float:
        """The smallest that at least this share, corrected for the size of the sample, does not exceed."""
        rank = math.ceil(share * (len(self._sorted) + 1))
        return self._sorted[min(rank, len(self._sorted)) - 1]


class Margins:
    """Residuals over the upper prediction, in logarithms, by data set and over all."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._by_dataset: dict[str, Residuals] = {}
        self._all = Residuals()

    def add(self, dataset: str, residual: float) -> None:
        """Note a completion's logarithm of length, less what had been predicted as upper."""
        self._by_dataset.setdefault(dataset, Residuals()).add(residual)
        self._all.add(residual)

    def of(self, dataset: str) -> float:
        """What to add to the upper prediction; zero until enough is known."""
        for residuals in (self._by_dataset.get(dataset), self._all):
            if residuals is not None and len(residuals) >= ENOUGH:
                return residuals.quantile(self._share)
        return 0.0
