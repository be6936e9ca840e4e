"""The last so many lengths, and their quantiles."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque


class RecentLengths:
    """The last so many lengths, in order of arrival and of size."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        """Note a length; the oldest one leaves when the window is full."""
        if len(self._arrived) == self._window:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the lengths does not exceed (nearest rank)."""
        return self._sorted[max(0, math.ceil(share * len(self._sorted)) - 1)]

    def rank(self, length: int) -> float:
        """Share of the lengths that are shorter, those alike counted half; 0 to 1, and 0.5 before any is noted."""
        if not self._sorted:
            return 0.5
        return (bisect_left(self._sorted, length) + bisect_right(self._sorted, length)) / 2 / len(self._sorted)

    def in_order(self) -> list[int]:
        """A copy, the shortest first."""
        return list(self._sorted)
