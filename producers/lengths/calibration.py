"""How good the estimates were over recent completions: coverage, error, order of lengths, and buckets.

Two baselines are scored over the same completions: one predicts the same length for all, and one predicts the recent
quantiles of the prompt's data set.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streamrl.producers.lengths.buckets import Buckets, RecentLengths
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate

# How well estimates order prompts: recall of the longest, and Kendall's tau. Both are dimensionless and handle ties.

LONGEST = 0.2
"""Share of completions that count as the tail: alpha in StreamRL (arXiv 2504.15930, section 4)."""


def recall_of_longest(predicted: ArrayLike, actual: ArrayLike, share: float = LONGEST) -> float | None:
    """Share of the longest ``share`` of lengths that is among the ``share`` predicted longest; None for no lengths.

    If lengths tie for the last places, any of them counts as longest. If predictions tie for the last places, each
    counts in part: the mean over random orders. So predicting the same for all has a recall of ``share`` if lengths
    differ.
    """
    guesses, lengths = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if not len(lengths):
        return None
    count = max(1, round(share * len(lengths)))
    # Weight of each as predicted longest: 1 for those above the edge; those that tie at it share the places left.
    above, tied = _largest(guesses, count)
    chosen = above + tied * (count - above.sum()) / tied.sum()
    # Recall = |predicted longest and truly longest| / count; true ties count up to the places left.
    above, tied = _largest(lengths, count)
    return float(chosen[above].sum() + min(chosen[tied].sum(), count - above.sum())) / count


def _largest(values: NDArray[np.float64], count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of the values that are certainly among the ``count`` largest, and of those that tie for the last places."""
    edge = np.partition(values, len(values) - count)[len(values) - count]
    return values > edge, values == edge


def kendall_tau(predicted: ArrayLike, actual: ArrayLike) -> float | None:
    """Kendall's tau-b in -1 to 1 (Kendall 1945), over all pairs; None for fewer than two or if all lengths are equal.

    Predicting the same for all gives 0. Time and memory grow with the square of the count.
    """
    guesses, lengths = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    if len(lengths) < 2:
        return None
    # int8 [N, N]: 1 where the row's is longer than the column's, -1 where it is shorter, 0 where they tie.
    by_guess = np.sign(guesses[:, None] - guesses[None, :]).astype(np.int8)
    by_length = np.sign(lengths[:, None] - lengths[None, :]).astype(np.int8)
    if not by_length.any():
        return None
    # tau-b = (concordant - discordant pairs) / sqrt(pairs untied in one × pairs untied in the other).
    untied = math.sqrt(np.count_nonzero(by_guess)) * math.sqrt(np.count_nonzero(by_length))
    return int((by_guess * by_length).sum(dtype=np.int64)) / untied if untied else 0.0


ORDERED = 512
"""Newest completions over which orders are compared."""
UPPER_SHARE = 0.9
"""Share of completions that should not exceed the upper estimate."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """``recall``: of the longest 20 %; ``tau``: Kendall's tau-b; ``coverage``: share at or below the upper estimate."""

    recall: float | None
    tau: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """Scores over the completions in the window. ``predicted`` and ``actual`` count completions by bucket.

    ``mean_abs_error``: of the median, in tokens. ``ours``, ``constant`` and ``per_dataset`` compare the orders;
    ``made_by`` counts estimates by predictor, so that fallbacks are visible. ``boundaries``: present bucket boundaries,
    in tokens. Values that are not known yet are None.
    """

    observations: int
    mean_abs_error: float | None
    predicted: tuple[int, ...]
    actual: tuple[int, ...]
    ours: Ranking
    constant: Ranking
    per_dataset: Ranking
    made_by: dict[str, int]
    boundaries_version: int
    boundaries: tuple[int, ...]

    @property
    def coverage(self) -> float | None:
        """Share of lengths at or below the upper estimate."""
        return self.ours.coverage

    def fields(self) -> dict[str, object]:
        """The fields of a log line: shares rounded, baselines by name."""
        rankings = {"": self.ours, "_constant": self.constant, "_per_dataset": self.per_dataset}
        return {
            "length_error": None if self.mean_abs_error is None else round(self.mean_abs_error, 1),
            **{
                f"length_{score}{name}": None if value is None else round(value, 3)
                for name, ranking in rankings.items()
                for score, value in asdict(ranking).items()
            },
            "lengths_by": self.made_by,
            "buckets_predicted": self.predicted,
            "buckets_actual": self.actual,
            "boundaries_version": self.boundaries_version,
            "boundaries": self.boundaries,
        }


@dataclass(frozen=True, slots=True)
class _Outcome:
    """An estimate, the baselines' medians and upper estimates at that time, and the actual length and bucket."""

    estimate: LengthEstimate
    per_dataset: tuple[int, int]
    constant: tuple[int, int]
    length: int
    bucket: int


class Calibration:
    """Compares each estimate with the actual length."""

    def __init__(self, loop: LoopSettings, window: int = 2048, buckets: Buckets | None = None) -> None:
        self._loop = loop
        self._buckets = buckets or Buckets(loop.bucket_boundaries)
        self._window = window
        self._outcomes: deque[_Outcome] = deque(maxlen=window)
        self._by_dataset: dict[str, RecentLengths] = {}
        self._all = RecentLengths(window)

    def observe(self, estimate: LengthEstimate, output_length: int, dataset: str = "") -> None:
        """Note the actual output length in tokens for an estimate. The baselines learn it afterwards."""
        own = self._by_dataset.setdefault(dataset, RecentLengths(self._window))
        # Like the predictor, the baselines predict before they learn this completion.
        constant = self._guess(self._all)
        bucket = self._buckets.of(output_length)
        self._outcomes.append(_Outcome(estimate, self._guess(own), constant, output_length, bucket))
        own.observe(output_length)
        self._all.observe(output_length)

    def _guess(self, seen: RecentLengths) -> tuple[int, int]:
        seen = seen if len(seen) else self._all
        return (seen.quantile(0.5), seen.quantile(UPPER_SHARE)) if len(seen) else (1, self._loop.max_completion_length)

    def report(self) -> CalibrationReport:
        """The scores over the window."""
        seen = list(self._outcomes)
        error = sum(abs(outcome.length - outcome.estimate.median) for outcome in seen)
        ours = self._ranking(seen, [(outcome.estimate.median, outcome.estimate.upper) for outcome in seen])
        constant = self._ranking(seen, [outcome.constant for outcome in seen])
        return CalibrationReport(
            observations=len(seen),
            mean_abs_error=error / len(seen) if seen else None,
            predicted=self._by_bucket([outcome.estimate.bucket for outcome in seen]),
            actual=self._by_bucket([outcome.bucket for outcome in seen]),
            ours=ours,
            # Equal predictions for all, here 1, tie everywhere. The upper estimate is still a quantile.
            constant=Ranking(*_order([1] * len(seen), seen), constant.coverage),
            per_dataset=self._ranking(seen, [outcome.per_dataset for outcome in seen]),
            made_by=dict(Counter(outcome.estimate.predictor.partition("/")[0] for outcome in seen)),
            boundaries_version=self._buckets.version,
            boundaries=self._buckets.boundaries.lengths,
        )

    def _ranking(self, seen: Sequence[_Outcome], guesses: Sequence[tuple[int, int]]) -> Ranking:
        covered = sum(outcome.length <= upper for outcome, (_, upper) in zip(seen, guesses, strict=True))
        return Ranking(*_order([median for median, _ in guesses], seen), covered / len(seen) if seen else None)

    def _by_bucket(self, buckets: list[int]) -> tuple[int, ...]:
        counts = Counter(buckets)
        return tuple(counts[bucket] for bucket in range(self._loop.num_buckets))


def _order(medians: Sequence[int], seen: Sequence[_Outcome]) -> tuple[float | None, float | None]:
    # All pairs are compared, so only the newest completions are used.
    lengths = [outcome.length for outcome in seen[-ORDERED:]]
    return recall_of_longest(medians[-ORDERED:], lengths), kendall_tau(medians[-ORDERED:], lengths)
