"""Which prompt comes next, after a crash too. Pure.

The prompts of a window leave in the order of a plan, and no later window is drawn before all of them are sent. A window
has at most groups_per_step prompts; so whatever was drawn and not sent lies within so many positions below the cursor.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Positions:
    """``cursor``: every position below it was drawn; ``holes``: those below it that must be sent before any other.

    ``ordered``: names of groups for which there was an order once, as far as that is known without the order.
    """

    window: int
    cursor: int = 0
    holes: list[int] = field(default_factory=list)
    ordered: frozenset[str] = frozenset()
    _seen: set[int] = field(default_factory=set)

    def see(self, position: int) -> None:
        """There was an order for this position."""
        self.pass_to(position + 1)
        self._seen.add(position)
        if len(self._seen) > 4 * self.window:
            self._forget()

    def pass_to(self, cursor: int) -> None:
        """Every position below was drawn."""
        self.cursor = max(self.cursor, cursor)

    def find_holes(self, ordered: Iterable[str]) -> None:
        """After a restart: what a window of the last life may have left unsent."""
        self._forget()
        self.holes = [n for n in range(max(0, self.cursor - self.window), self.cursor) if n not in self._seen]
        self.ordered = frozenset(ordered) if self.holes else frozenset()
        self._seen.clear()

    def next(self, count: int) -> list[int]:
        """The next positions, holes before all others; they count as drawn."""
        count = min(count, self.window)
        found, self.holes = self.holes[:count], self.holes[count:]
        if not found:
            found = list(range(self.cursor, self.cursor + count))
            self.cursor += count
        return found

    def upcoming(self, count: int) -> list[int]:
        """What ``next`` would return behind the holes, and goes on returning."""
        return list(range(self.cursor, self.cursor + count))

    def _forget(self) -> None:
        self._seen = {n for n in self._seen if n >= self.cursor - self.window}
