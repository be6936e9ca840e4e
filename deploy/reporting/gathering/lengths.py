"""How good the length estimates of recorded completions were. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from deploy.live.parts.histograms import Calibration
from deploy.reporting.gathering.gathered import LengthFacts
from producers.lengths.measures.scores import recall_of_longest

WINDOWS = 16
LEAST = 64
"""Completions of a window at least: the longest fifth of fewer says little."""


class Estimated(NamedTuple):
    """A completion: when it ended, its length in tokens, and what was predicted. ``upper`` None: not known."""

    at: float
    predicted: int
    actual: int
    upper: int | None


def length_facts(completions: Sequence[Estimated]) -> LengthFacts | None:
    """None for no completion. Order is judged within windows of time, for lengths drift as the policy learns."""
    if not completions:
        return None
    calibration = Calibration()
    counts: dict[tuple[int, int], int] = {}
    for each in completions:
        calibration.add(each.predicted, each.actual)
        calibration.since_fade = 0
    for cell, count in calibration.cells.items():
        counts[cell] = round(count)
    windows = [_judged(window) for window in _windows(sorted(completions, key=lambda each: each.at))]
    return LengthFacts(
        count=len(completions),
        cells=tuple((*cell, count) for cell, count in sorted(counts.items())),
        recall=_mean([recall for _, recall, _, _ in windows]),
        constant=_mean([constant for _, _, constant, _ in windows]),
        coverage=_coverage(completions),
        factor=calibration.typical_factor,
        windows=tuple((at, recall, coverage) for at, recall, _, coverage in windows),
    )


def _windows(ascending: Sequence[Estimated]) -> list[Sequence[Estimated]]:
    count = max(1, min(WINDOWS, len(ascending) // LEAST))
    edges = [round(index * len(ascending) / count) for index in range(count + 1)]
    return [ascending[begin:end] for begin, end in pairwise(edges)]


def _judged(window: Sequence[Estimated]) -> tuple[float, float | None, float | None, float | None]:
    actual = [each.actual for each in window]
    recall = recall_of_longest([each.predicted for each in window], actual)
    constant = recall_of_longest([1] * len(window), actual)
    return round(window[-1].at, 3), recall, constant, _coverage(window)


def _coverage(completions: Sequence[Estimated]) -> float | None:
    known = [each.actual <= each.upper for each in completions if each.upper is not None]
    return sum(known) / len(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
