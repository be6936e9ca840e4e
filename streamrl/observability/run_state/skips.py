"""What was not trained, and why: counts by reason since the run began, and what skips of a reason have in common. Pure.

Both are bounded, as all of a run's state is.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

CAUSES_HELD = 32
OTHER_CAUSES = "other causes"
CAUSE_LIMIT = 100
EXAMPLE_LIMIT = 400
"""Characters of a cause, and of an example: a line or two for a display, whatever a reward function said."""
SKIPS_HELD = 20_000
"""Skip rows that no step has reported yet: more than come between two steps, unless none comes at all."""


@dataclass
class SkipCounts:
    """Trajectories skipped since the run began, by reason: as the newest step reported them, and the rows since then.

    What a crash undid does not count: a lineage reports on from what its checkpoint holds.
    """

    reported: Counter[str] = field(default_factory=Counter)
    _lineage: int = 0
    _reported_at: float = -math.inf
    _since: deque[tuple[int, float, str, int]] = field(default_factory=lambda: deque(maxlen=SKIPS_HELD))

    def add(self, lineage: int, sent_at: float, reason: str, count: int) -> None:
        """A row came; it may be one that a report has counted already."""
        # Rows and reports are stamped by one clock: that of the trainer that sends both.
        if lineage > self._lineage or (lineage == self._lineage and sent_at > self._reported_at):
            self._since.append((lineage, sent_at, reason, count))

    def report(self, lineage: int, sent_at: float, reported: Mapping[str, int]) -> None:
        """A step of the newest lineage, or a lineage's beginning, says what counts up to it."""
        self.reported, self._lineage, self._reported_at = Counter(reported), lineage, sent_at
        waiting, self._since = list(self._since), deque(maxlen=SKIPS_HELD)
        for row in waiting:
            self.add(*row)

    def counts(self) -> dict[str, int]:
        """By reason, those above 0."""
        found = self.reported.copy()
        for *_, reason, count in self._since:
            found[reason] += count
        return {reason: count for reason, count in sorted(found.items()) if count}


@dataclass
class SkipCauses:
    """Why trajectories were skipped for one reason: how many by cause, and an example in full. It stays bounded."""

    counts: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, detail: str, where: str | None, count: int) -> None:
        """So many rows with this detail; a cause is what stands before its first colon. ``where``: for the example."""
        cause, _, rest = detail.partition(": ")
        cause = cause[:CAUSE_LIMIT]
        # Bytes that did not decode may be wrong in any number of ways.
        self.counts[cause if cause in self.counts or len(self.counts) < CAUSES_HELD else OTHER_CAUSES] += count
        if not self.example:
            self.example = ": ".join(filter(None, (where, rest or detail)))[:EXAMPLE_LIMIT]
