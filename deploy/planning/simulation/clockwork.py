"""Events in order of time; among simultaneous ones, in the order in which they were asked for. Knows no pipeline."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass
class Clockwork:
    """``now``: seconds since the beginning."""

    now: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Have something done at a moment, or now if that has passed."""
        heapq.heappush(self._due, (max(moment, self.now), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something done in so many seconds."""
        self.at(self.now + seconds, act)

    def run_until(self, over: Callable[[], bool]) -> bool:
        """Go on until it is over; false if nothing is left to happen before that."""
        while not over():
            if not self._due:
                return False
            self.now, _, act = heapq.heappop(self._due)
            act()
        return True
