"""Skipped trajectories: counts by reason since the run's start, and the causes that skips of a reason share. Pure.

Both are bounded, like all of a run's state.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

CAUSES_HELD = 32
OTHER_CAUSES = "other causes"
CAUSE_LIMIT = 100
EXAMPLE_LIMIT = 400
"""Most characters of a cause, and of an example: one or two lines of a display, however long an error text is."""
SKIPS_HELD = 20_000
"""Most skip rows kept that no step has reported yet: more than arrive between two steps, unless training stopped."""


@dataclass
class SkipCounts:
    """Trajectories skipped since the run's start, by reason: the newest step's report, and the rows since then.

    Skips that a crash undid do not count: a lineage continues from the counts in its checkpoint.
    """

    reported: Counter[str] = field(default_factory=Counter)
    _lineage: int = 0
    _reported_at: float = -math.inf
    _since: deque[tuple[int, float, str, int]] = field(default_factory=lambda: deque(maxlen=SKIPS_HELD))

    def add(self, lineage: int, sent_at: float, reason: str, count: int) -> None:
        """Note a row. A report may have counted it already."""
        # Time stamps of rows and reports are from one clock, since one trainer sends both.
        if lineage > self._lineage or (lineage == self._lineage and sent_at > self._reported_at):
            self._since.append((lineage, sent_at, reason, count))

    def report(self, lineage: int, sent_at: float, reported: Mapping[str, int]) -> None:
        """Note the counts up to a step of the newest lineage, or up to a lineage's start."""
        self.reported, self._lineage, self._reported_at = Counter(reported), lineage, sent_at
        waiting, self._since = list(self._since), deque(maxlen=SKIPS_HELD)
        for row in waiting:
            self.add(*row)

    def counts(self) -> dict[str, int]:
        """The counts by reason, without zeros."""
        found = self.reported.copy()
        for *_, reason, count in self._since:
            found[reason] += count
        return {reason: count for reason, count in sorted(found.items()) if count}


@dataclass
class SkipCauses:
    """The causes of skips for one reason: a count for each cause, and one example. Bounded."""

    counts: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, detail: str, where: str | None, count: int) -> None:
        """Count rows with this detail. The cause is the text before the first colon. ``where``: for the example."""
        cause, _, rest = detail.partition(": ")
        cause = cause[:CAUSE_LIMIT]
        # The number of causes is unbounded, for example for bytes that did not decode.
        self.counts[cause if cause in self.counts or len(self.counts) < CAUSES_HELD else OTHER_CAUSES] += count
        if not self.example:
            self.example = ": ".join(filter(None, (where, rest or detail)))[:EXAMPLE_LIMIT]
