"""How long this process was ready to run and had no processor: why it may not have heard what a broker answered."""

import time
from collections.abc import Callable
from pathlib import Path

SCHEDSTAT = Path("/proc/self/schedstat")
STARVED = 0.5
"""Share of the time without a processor from which a silence is ours rather than the broker's."""
LEAST_S = 0.5


class ProcessorWait:
    """Measured since it was made, or since ``begin``."""

    def __init__(
        self, waited_s: Callable[[], float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._waited_s, self._clock = waited_s or waited_by_us, clock
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._began_at, self._before = self._clock(), self._waited_s()

    @property
    def is_starved(self) -> bool:
        """Whether this process waited for a processor most of the time."""
        elapsed = self._clock() - self._began_at
        return elapsed >= LEAST_S and self._waited_s() - self._before > STARVED * elapsed


def waited_by_us() -> float:
    """Seconds since this process began, of its main thread; 0 where the system does not count them."""
    try:
        # Time on a processor and time in line for one, both in nanoseconds, and a count (Documentation/scheduler).
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
