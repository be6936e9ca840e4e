"""A clock that stands still until it is moved."""

from dataclasses import dataclass


@dataclass
class FakeClock:
    """Seconds since the epoch, as ``time.time`` gives them."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
