"""What the language model learns from: a prompt's text and a length that came of it. Knows no library."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Levels = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Example:
    """``length`` in tokens of one completion of a prompt."""

    text: str
    dataset: str
    length: int


@dataclass(frozen=True, slots=True)
class Lesson:
    """``targets``: by text, logarithms of length over the data set's level, divided by ``scale``.

    ``levels``: by data set, the median logarithm and how many completions that rests on.
    """

    texts: tuple[str, ...]
    targets: tuple[tuple[float, ...], ...]
    levels: Levels
    scale: float


def lesson_of(examples: Sequence[Example], levels: Levels | None = None, scale: float | None = None) -> Lesson:
    """Completions of one text together; levels and scale are measured unless those of an earlier lesson are given."""
    by_dataset: dict[str, list[float]] = {}
    by_text: dict[tuple[str, str], list[float]] = {}
    for example in examples:
        logarithm = math.log(max(1, example.length))
        by_dataset.setdefault(example.dataset, []).append(logarithm)
        by_text.setdefault((example.dataset, example.text), []).append(logarithm)
    measured = {dataset: (statistics.median(values), len(values)) for dataset, values in by_dataset.items()}
    levels = {**measured, **(levels or {})}
    over = {key: [value - levels[key[0]][0] for value in values] for key, values in by_text.items()}
    if scale is None:
        scale = max(0.05, statistics.pstdev([value for values in over.values() for value in values] or [1.0]))
    return Lesson(
        texts=tuple(text for _, text in over),
        targets=tuple(tuple(value / scale for value in values) for values in over.values()),
        levels=levels,
        scale=scale,
    )
