"""The clocks of a simulated machine: set wrong, stepped, and drifting; its monotonic clock only drifts."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from streamrl.planning.virtual_time import START

SKEWS_S = (0.0, 0.0, 0.4, -0.7, -5.0, 90.0, -300.0, 7200.0, -7200.0)
STEPS_S = (-0.5, 0.5, -5.0, 5.0, -120.0, 300.0, -7200.0, 7200.0, -86_400.0)
MOST_DRIFT = 0.01
"""Seconds a second: a hundred times what a quartz does, so that it shows within a minute."""


@dataclass
class HostClock:
    """One machine's: called, it tells the time of day. ``true``: virtual time; ``booted``: the monotonic clock then."""

    true: Callable[[], float]
    skew_s: float = 0.0
    drift: float = 0.0
    booted: float = 0.0

    @classmethod
    def drawn(cls, true: Callable[[], float], chance: Random) -> "HostClock":
        """A clock of some machine."""
        drift = MOST_DRIFT * chance.uniform(-1.0, 1.0)
        return cls(true, chance.choice(SKEWS_S), drift, chance.uniform(0.0, 1e6))

    def __call__(self) -> float:
        """Seconds since the epoch, as this machine has it."""
        return self.true() + self.skew_s + self.drift * (self.true() - START)

    def monotonic(self) -> float:
        """Seconds since some moment; nobody sets it."""
        return self.booted + (1.0 + self.drift) * (self.true() - START)

    def step(self, seconds: float) -> None:
        """Somebody, or NTP, sets it."""
        self.skew_s += seconds
