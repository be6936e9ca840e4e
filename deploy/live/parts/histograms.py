"""Predicted against actual length, and staleness: counts in fixed classes, recent ones weighing more."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

PER_DOUBLING = 2
CLASSES = 40
WITHIN = 1.5
FADE_EVERY = 20_000


def length_class(tokens: int) -> int:
    """Two classes for each doubling."""
    return min(CLASSES - 1, round(PER_DOUBLING * math.log2(max(1, tokens))))


@dataclass
class Calibration:
    """Counts of (predicted, actual) by class. Each is halved from time to time, so that old ones fade."""

    cells: dict[tuple[int, int], float] = field(default_factory=dict)
    close: float = 0.0
    count: float = 0.0
    error: float = 0.0
    since_fade: int = 0

    def add(self, predicted: int, actual: int) -> None:
        """Note a completion."""
        cell = length_class(predicted), length_class(actual)
        self.cells[cell] = self.cells.get(cell, 0.0) + 1.0
        ratio = max(predicted, 1) / max(actual, 1)
        self.close += 1 / WITHIN <= ratio <= WITHIN
        self.error += abs(math.log(ratio))
        self.count += 1
        self.since_fade += 1
        if self.since_fade >= FADE_EVERY:
            self._fade()

    def _fade(self) -> None:
        self.cells = {cell: count / 2 for cell, count in self.cells.items() if count >= 1}
        self.close, self.count, self.error, self.since_fade = self.close / 2, self.count / 2, self.error / 2, 0

    @property
    def close_share(self) -> float | None:
        """Share of completions whose length was within a factor of 1.5 of the prediction."""
        return self.close / self.count if self.count else None

    @property
    def typical_factor(self) -> float | None:
        """Geometric mean of how many times too long or too short predictions are."""
        return math.exp(self.error / self.count) if self.count else None


@dataclass
class Staleness:
    """Trajectories by the age of their oldest token when they were trained, in steps."""

    counts: dict[int, float] = field(default_factory=dict)
    since_fade: int = 0

    def add(self, ages: Iterable[int]) -> None:
        """Note a step's trajectories."""
        for age in ages:
            key = min(max(0, age), CLASSES - 1)
            self.counts[key] = self.counts.get(key, 0.0) + 1.0
            self.since_fade += 1
        if self.since_fade >= FADE_EVERY:
            self.counts, self.since_fade = {age: count / 2 for age, count in self.counts.items() if count >= 1}, 0
