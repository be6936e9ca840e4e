"""How good the estimates were: coverage, error, and predicted against actual buckets over recent completions."""

from collections import Counter, deque
from dataclasses import dataclass

from schemas.messages.prompts import LengthEstimate
from schemas.settings import LoopSettings


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """Over the completions in the window. ``predicted`` and ``actual`` count completions by bucket.

    ``coverage``: share at or below the upper estimate; ``mean_abs_error``: of the median, in tokens. Both are none
    until something was seen.
    """

    observations: int
    coverage: float | None
    mean_abs_error: float | None
    predicted: tuple[int, ...]
    actual: tuple[int, ...]


class Calibration:
    """Compares each estimate with the length that came of it."""

    def __init__(self, loop: LoopSettings, window: int = 2048) -> None:
        self._loop = loop
        self._pairs: deque[tuple[LengthEstimate, int]] = deque(maxlen=window)

    def add(self, estimate: LengthEstimate, output_length: int) -> None:
        """Note the actual output length in tokens behind an estimate."""
        self._pairs.append((estimate, output_length))

    def report(self) -> CalibrationReport:
        """The numbers over the window."""
        count = len(self._pairs)
        covered = sum(length <= estimate.upper for estimate, length in self._pairs)
        error = sum(abs(length - estimate.median) for estimate, length in self._pairs)
        return CalibrationReport(
            observations=count,
            coverage=covered / count if count else None,
            mean_abs_error=error / count if count else None,
            predicted=self._by_bucket([estimate.bucket for estimate, _ in self._pairs]),
            actual=self._by_bucket([self._loop.bucket_of(length) for _, length in self._pairs]),
        )

    def _by_bucket(self, buckets: list[int]) -> tuple[int, ...]:
        counts = Counter(buckets)
        return tuple(counts[bucket] for bucket in range(self._loop.num_buckets))
