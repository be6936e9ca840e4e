"""How well estimates order prompts: recall of the longest, and Kendall's tau. Pure numbers, ties counted fairly."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LONGEST = 0.2
"""Share of completions that count as the tail: the paper's alpha (StreamRL, arXiv 2504.15930, section 4)."""


def recall_of_longest(predicted: ArrayLike, actual: ArrayLike, share: float = LONGEST) -> float | None:
    """Of the longest ``share``, how much is among the ``share`` predicted longest; none for nothing.

    Of lengths that tie for the last places any are right. Of predictions that tie for them each counts in part: what a
    random order gives on average. So predicting the same for all has a recall of ``share`` where lengths differ.
    """
    guesses, lengths = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if not len(lengths):
        return None
    count = max(1, round(share * len(lengths)))
    above, tied = _largest(guesses, count)
    chosen = above + tied * (count - above.sum()) / tied.sum()
    above, tied = _largest(lengths, count)
    return float(chosen[above].sum() + min(chosen[tied].sum(), count - above.sum())) / count


def _largest(values: NDArray[np.float64], count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which are surely among the ``count`` largest, and which tie for the last places."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    return values > edge, values == edge


def kendall_tau(predicted: ArrayLike, actual: ArrayLike) -> float | None:
    """Kendall's tau-b in -1 to 1 (Kendall 1945), over all pairs; none for fewer than two or when lengths are all alike.

    Predicting the same for all gives 0: it says nothing. Time and memory grow with the square of the count.
    """
    guesses, lengths = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if len(lengths) < 2:
        return None
    by_guess = np.sign(guesses[:, None] - guesses[None, :]).astype(np.int8)
    by_length = np.sign(lengths[:, None] - lengths[None, :]).astype(np.int8)
    if not by_length.any():
        return None
    untied = math.sqrt(np.count_nonzero(by_guess)) * math.sqrt(np.count_nonzero(by_length))
    return int((by_guess * by_length).sum(dtype=np.int64)) / untied if untied else 0.0
