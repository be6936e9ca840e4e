"""How good estimates are on prompts that nothing was fitted to, by data set and over all. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from producers.lengths.measures.scores import kendall_tau, recall_of_longest

TAILS = (0.2, 0.1, 0.05)
"""Shares of the longest whose recall the paper gives (StreamRL, table 4)."""
MAX_PAIRS = 4000
"""Completions, at most, whose order tau compares; all pairs of them are held in memory."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A median, an upper estimate and the length that came of it, in tokens."""

    dataset: str
    median: float
    upper: float
    length: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """``recall``: of the longest 20, 10 and 5 %; ``coverage``: share of lengths at or below the upper estimate."""

    completions: int
    recall: tuple[float | None, ...]
    tau: float | None
    coverage: float

    def fields(self) -> dict[str, float | int | None]:
        """By name, rounded."""
        recalls = {f"recall_{round(100 * share)}": value for share, value in zip(TAILS, self.recall, strict=True)}
        scores = {**recalls, "tau": self.tau, "coverage": self.coverage}
        return {
            "completions": self.completions,
            **{name: None if value is None else round(value, 4) for name, value in scores.items()},
        }


def judge(guesses: Sequence[Guess]) -> dict[str, Judgement]:
    """By data set, and over ``all``."""
    medians = np.array([guess.median for guess in guesses], np.float64)
    uppers = np.array([guess.upper for guess in guesses], np.float64)
    lengths = np.array([guess.length for guess in guesses], np.float64)
    names = np.array([guess.dataset for guess in guesses])
    chosen = {"all": np.ones(len(guesses), bool), **{str(name): names == name for name in np.unique(names)}}
    return {name: _judged(medians[rows], uppers[rows], lengths[rows]) for name, rows in chosen.items() if rows.any()}


def _judged(medians: NDArray[np.float64], uppers: NDArray[np.float64], lengths: NDArray[np.float64]) -> Judgement:
    step = math.ceil(len(lengths) / MAX_PAIRS)
    return Judgement(
        completions=len(lengths),
        recall=tuple(recall_of_longest(medians, lengths, share) for share in TAILS),
        tau=kendall_tau(medians[::step], lengths[::step]),
        coverage=float((lengths <= uppers).mean()),
    )


def baselines(
    taught: Mapping[str, Sequence[int]], asked: Sequence[tuple[str, int]], upper: float
) -> dict[str, list[Guess]]:
    """Of what was taught, lengths by data set: the same quantiles for all, and those of the data set."""
    every = [length for lengths in taught.values() for length in lengths]
    constant = _quantiles(every, upper)
    own = {dataset: _quantiles(lengths, upper) for dataset, lengths in taught.items()}
    return {
        "constant": [Guess(dataset, *constant, length) for dataset, length in asked],
        "per_dataset": [Guess(dataset, *own.get(dataset, constant), length) for dataset, length in asked],
    }


def _quantiles(lengths: Sequence[int], upper: float) -> tuple[float, float]:
    median, high = np.quantile(np.array(lengths, np.float64), [0.5, upper], method="inverted_cdf")
    return float(median), float(high)
