"""The cores of one machine, which the processes of a simulated run share.

Invariants: free_cores_change_nothing; equal_work_takes_the_same_time_in_any_order.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from streamrl.schemas.profiles import CoreCosts


@dataclass(eq=False)
class SharedCores:
    """Tells how far computation has come, in seconds of a process that computes alone on the machine.

    While the processes of the run want more than the machine has, all of them compute slower, by the same factor. So
    one clock serves them all: ``now`` is the integral of ``costs.speed(demand)`` over time. ``clock``: virtual seconds.
    ``scale``: wall-clock seconds of a virtual second.
    """

    costs: CoreCosts
    clock: Callable[[], float]
    scale: float = 1.0
    _works: "dict[object, tuple[float, float]]" = field(init=False, default_factory=dict)  # (cores, end) by process
    _busy_s: "defaultdict[object, float]" = field(init=False, default_factory=lambda: defaultdict(float))
    _others_end: float = field(init=False, default=0.0)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._at = self._now = self.clock()
        self._speed = self.costs.speed(self.costs.cores_per_run)

    def now(self) -> float:
        """Seconds of computation so far; they pass at most as fast as virtual time."""
        return self._now + (self.clock() - self._at) * self._speed

    def compute(self, process: object, cores: float, end: float) -> None:
        """Note that a process keeps so many cores busy until ``end``, a time of ``now``; 0: until now."""
        self._settle()
        if end > self._now:
            self._works[process] = cores, end
        else:
            self._works.pop(process, None)
        self._renew()

    def busy_s(self, process: object) -> float:
        """Virtual seconds in which a process has computed or waited for its turn."""
        self._settle()
        return self._busy_s[process]

    def add_trajectory(self) -> None:
        """Note a new trajectory, which all other processes of the run now work on, one trajectory after the other."""
        self._others_end = max(self._others_end, self.now()) + self.costs.cpu_s_per_trajectory / self.scale
        self.compute(self, 1.0, self._others_end)

    def _settle(self) -> None:
        for process, (_, end) in self._works.items():
            self._busy_s[process] += (min(self.now(), end) - self._now) / self._speed
        self._now, self._at = self.now(), self.clock()

    def _renew(self) -> None:
        """Compute the speed again, now and when the first of the processes has done its work."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._works = {process: work for process, work in self._works.items() if work[1] > self._now}
        self._speed = self.costs.speed(self.costs.cores_per_run + sum(cores for cores, _ in self._works.values()))
        first = min((end for _, end in self._works.values()), default=inf)
        if first < inf:
            # Rounding must not let the timer end before the work, or it would be set again and again.
            wait_s = (first - self._now) / self._speed + 1e-9
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._one_is_done)

    def _one_is_done(self) -> None:
        self._timer = None
        self._settle()
        self._renew()
