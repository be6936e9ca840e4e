"""How good the estimates were over recent completions: coverage, error, order of lengths, and buckets.

Next to each run two baselines over the same completions: one that says the same for all, and one that says its data
set's recent quantiles.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from producers.lengths.measures.buckets import Buckets
from producers.lengths.measures.recent import RecentLengths
from producers.lengths.measures.scores import kendall_tau, recall_of_longest
from schemas.messages.prompts import LengthEstimate
from schemas.settings import LoopSettings

ORDERED = 512
"""Completions, the newest, over which orders are compared."""
UPPER_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Ranking:
    """``recall``: of the longest 20 %; ``tau``: Kendall's tau-b; ``coverage``: share at or below the upper estimate."""

    recall: float | None
    tau: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """Over the completions in the window. ``predicted`` and ``actual`` count completions by bucket.

    ``coverage``: share at or below the upper estimate; ``mean_abs_error``: of the median, in tokens. ``ours``,
    ``constant`` and ``per_dataset`` compare the orders; ``made_by`` counts estimates by predictor, so that a fallback
    shows. ``boundaries``: of the buckets now, in tokens. What cannot be said yet is none.
    """

    observations: int
    coverage: float | None
    mean_abs_error: float | None
    predicted: tuple[int, ...]
    actual: tuple[int, ...]
    ours: Ranking
    constant: Ranking
    per_dataset: Ranking
    made_by: dict[str, int]
    boundaries_version: int
    boundaries: tuple[int, ...]

    def fields(self) -> dict[str, object]:
        """For a line of the log: shares rounded, baselines by name."""
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
    """An estimate, the baselines' medians and upper estimates at the time, and the length and bucket it came to."""

    estimate: LengthEstimate
    per_dataset: tuple[int, int]
    constant: tuple[int, int]
    length: int
    bucket: int


class Calibration:
    """Compares each estimate with the length that came of it."""

    def __init__(self, loop: LoopSettings, window: int = 2048, buckets: Buckets | None = None) -> None:
        self._loop = loop
        self._buckets = buckets or Buckets(loop.bucket_boundaries)
        self._window = window
        self._outcomes: deque[_Outcome] = deque(maxlen=window)
        self._by_dataset: dict[str, RecentLengths] = {}
        self._all = RecentLengths(window)

    def add(self, estimate: LengthEstimate, output_length: int, dataset: str = "") -> None:
        """Note the actual output length in tokens behind an estimate. The baselines learn it afterwards."""
        alike = self._by_dataset.setdefault(dataset, RecentLengths(self._window))
        constant = self._guess(self._all)
        bucket = self._buckets.of(output_length)
        self._outcomes.append(_Outcome(estimate, self._guess(alike), constant, output_length, bucket))
        alike.add(output_length)
        self._all.add(output_length)

    def _guess(self, seen: RecentLengths) -> tuple[int, int]:
        seen = seen if len(seen) else self._all
        return (seen.quantile(0.5), seen.quantile(UPPER_SHARE)) if len(seen) else (1, self._loop.max_completion_length)

    def report(self) -> CalibrationReport:
        """The numbers over the window."""
        seen = list(self._outcomes)
        error = sum(abs(outcome.length - outcome.estimate.median) for outcome in seen)
        ours = self._ranking(seen, [(outcome.estimate.median, outcome.estimate.upper) for outcome in seen])
        constant = self._ranking(seen, [outcome.constant for outcome in seen])
        return CalibrationReport(
            observations=len(seen),
            coverage=ours.coverage,
            mean_abs_error=error / len(seen) if seen else None,
            predicted=self._by_bucket([outcome.estimate.bucket for outcome in seen]),
            actual=self._by_bucket([outcome.bucket for outcome in seen]),
            ours=ours,
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
    lengths = [outcome.length for outcome in seen[-ORDERED:]]
    return recall_of_longest(medians[-ORDERED:], lengths), kendall_tau(medians[-ORDERED:], lengths)
