"""How many of something came in a second, over the last few seconds."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Rate:
    """Counts by tenths of a second within a window; holds as many numbers as the window has tenths."""

    window_s: float = 5.0
    total: float = 0.0
    _slots: deque[list[float]] = field(default_factory=deque)
    _held: float = 0.0

    def add(self, at: float, amount: float = 1.0) -> None:
        """Note what came ``at`` (epoch seconds); what lies behind the newest slot is counted in it."""
        self.total += amount
        slot = int(at * 10) / 10
        if self._slots and slot <= self._slots[-1][0]:
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])
        self._held += amount
        self._forget(self._slots[-1][0])

    def per_s(self, now: float) -> float:
        """Mean over the window that ends now."""
        self._forget(now)
        return max(0.0, self._held) / self.window_s

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - self.window_s:
            self._held -= self._slots.popleft()[1]
