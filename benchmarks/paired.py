"""A cost of a few per cent, from pairs of stretches that share whatever else the machine did meanwhile.

A shared machine's pace changes by ten per cent within minutes, so the two kinds of a pair are measured beside or right
after each other, the kind that has the better place or comes first alternates, and only ratios within a pair count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CUT = 0.2
"""Share of the pairs at either end that does not count: those in which the machine did something else meanwhile."""
CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Pair:
    """``without`` and ``having``: what a step took in the two stretches of a pair, in any unit, above zero."""

    without: float
    having: float

    @property
    def cost(self) -> float:
        """0.02 where having it takes two per cent longer."""
        return self.having / self.without - 1


@dataclass(frozen=True)
class Cost:
    """``typical``: trimmed geometric mean over the pairs, as a share; ``low`` and ``high``: its confidence interval."""

    typical: float
    low: float
    high: float
    pairs: tuple[Pair, ...]

    def __str__(self) -> str:
        return f"{self.typical:+.1%} ({self.low:+.1%} to {self.high:+.1%}, {len(self.pairs)} pairs)"

    def row(self) -> dict[str, Any]:
        """For a file of results."""
        return {
            "cost": round(self.typical, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "pairs": len(self.pairs),
            "quartiles": [round(float(at), 4) for at in np.quantile([pair.cost for pair in self.pairs], (0.25, 0.75))],
        }


def paired_cost(pairs: Sequence[Pair], seed: int) -> Cost:
    """What the pairs say together.

    Raises:
        ValueError: there are fewer than two.
    """
    from scipy.stats import bootstrap, trim_mean  # takes a second, which not everybody who measures in pairs needs

    if len(pairs) < 2:
        raise ValueError(f"expected two pairs or more, got {len(pairs)}")
    logs = np.log1p([pair.cost for pair in pairs])
    typical = float(np.expm1(trim_mean(logs, CUT)))
    if np.ptp(logs) == 0:
        return Cost(typical, typical, typical, tuple(pairs))

    def statistic(values: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(trim_mean(values, CUT, axis=axis))

    found = bootstrap(
        (logs,),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Cost(typical, float(np.expm1(found.low)), float(np.expm1(found.high)), tuple(pairs))
