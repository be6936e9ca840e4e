"""How often a display looks at a run: often if processors are idle, rarely if the run needs them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil

OFTEN_S, SELDOM_S = 1.0, 5.0
ROOM, CROWDED = 0.3, 0.15
"""Idle shares of all processors: above the first a display looks often, below the second rarely."""


class ProcessorTime(NamedTuple):
    """Seconds of all processors since the boot. ``free``: idle, or used by processes of low priority, as we are."""

    free: float
    total: float


class Pace:
    """The pace of one display process, from this machine's processor use between two calls."""

    def __init__(
        self, spent: Callable[[], ProcessorTime] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spent, self._clock = spent or spent_by_all, clock
        self._measured_at, self._before = clock(), self._spent()
        self._seconds = OFTEN_S

    def seconds(self) -> float:
        """Seconds until the next look."""
        now = self._clock()
        if now - self._measured_at >= OFTEN_S:
            spent = self._spent()
            self._seconds = pace_for((spent.free - self._before.free) / max(1e-9, spent.total - self._before.total))
            self._measured_at, self._before = now, spent
        return self._seconds


def pace_for(free: float) -> float:
    """Seconds between two looks if this share of all processors is idle."""
    crowded = min(1.0, max(0.0, (ROOM - free) / (ROOM - CROWDED)))
    return OFTEN_S + crowded * (SELDOM_S - OFTEN_S)


def spent_by_all(free: Sequence[str] = ("idle", "iowait", "nice")) -> ProcessorTime:
    """The times that the system counts; a kind that it does not count is zero.

    ``free``: the kinds that are free. For a display's pace, time at a low priority is.
    """
    times = psutil.cpu_times()._asdict()
    total = sum(seconds for kind, seconds in times.items() if not kind.startswith("guest"))  # guest is in user time too
    return ProcessorTime(sum(times.get(kind, 0.0) for kind in free), total)
