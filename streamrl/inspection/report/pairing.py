"""Compares two runs on the same prompts: the difference, its confidence interval, and its p-value. Pure.

Each prompt gives one difference, so the difficulty of prompts cancels. Two statistics describe the differences:

- p: the Wilcoxon signed-rank test, two-sided, zeros by Pratt (F. Wilcoxon, Individual Comparisons by Ranking Methods,
  Biometrics Bulletin 1, 1945), as ``scipy.stats.wilcoxon`` computes it. It is the probability of ranks at least as
  lopsided if differences up and down were equally likely. The test assumes no distribution of rewards, which are
  bounded, tied and skewed;
- the interval: the 95 % confidence interval of the mean difference, by the bias-corrected and accelerated bootstrap
  (B. Efron, Better Bootstrap Confidence Intervals, JASA 82, 1987), as ``scipy.stats.bootstrap`` computes it, from a
  fixed seed.

Prompts are assumed to be independent of each other. The samples of one prompt are not, so their mean counts once.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from streamrl.inspection.report.record import RunRecord

LEAST_PAIRS = 6
"""Fewest prompts for the test: with fewer, p cannot be below 5 %, since 2 / 2^5 is 6 %."""
LEVEL = 0.05
RESAMPLES = 4999
SECOND_HALF = 0.5
SCORES = ("correct", "reward", "score")
"""Columns of held-out samples that can be a score (a number or a bool), in order of preference."""


class PairedDifference(NamedTuple):
    """Compares run ``other`` with run ``first``: means over ``prompts``, and their difference (other - first).

    ``of``: the compared quantity; ``low``, ``high``: the interval of the difference. They and ``p`` are None if there
    are too few prompts.
    """

    first: str
    other: str
    of: str
    prompts: int
    mean_first: float
    mean_other: float
    difference: float
    low: float | None
    high: float | None
    p: float | None

    @property
    def is_significant(self) -> bool:
        """Whether p is below 5 %."""
        return self.p is not None and self.p < LEVEL

    @property
    def text(self) -> str:
        """The comparison in one line."""
        line = f"{self.of}: {self.other} {self.difference:+.4g} against {self.first} on {self.prompts:,} prompts"
        if self.p is None or self.low is None or self.high is None:
            return f"{line}; too few to judge"
        verdict = "a significant difference" if self.is_significant else "no significant difference"
        return f"{line}, 95 % interval {self.low:+.3g} to {self.high:+.3g}, p {shown_p(self.p)}: {verdict}"


def shown_p(p: float) -> str:
    """A p-value as text."""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.2f}"


def paired_differences(records: Sequence[RunRecord]) -> list[PairedDifference]:
    """Compares every run with the first one, on each quantity that both have for the same prompts."""
    found = []
    for other in records[1:]:
        first = records[0]
        for of, ours, theirs in (
            ("held-out score", held_out_scores(first), held_out_scores(other)),
            ("reward, second half", late_rewards(first), late_rewards(other)),
        ):
            if (difference := paired_difference(of, (first.name, ours), (other.name, theirs))) is not None:
                found.append(difference)
    return found


def paired_difference(
    of: str, first: tuple[str, Mapping[str, float]], other: tuple[str, Mapping[str, float]]
) -> PairedDifference | None:
    """Compares two runs, each given as a name and values by prompt; None if they have no prompt in common."""
    (first_name, ours), (other_name, theirs) = first, other
    # Sorted, so that the interval is always the same.
    prompts = sorted(ours.keys() & theirs.keys())
    if not prompts:
        return None
    before, after = (np.array([values[prompt] for prompt in prompts]) for values in (ours, theirs))
    differences = after - before
    low = high = p = None
    if len(prompts) >= LEAST_PAIRS:
        p = signed_rank_p(differences)
        low, high = mean_interval(differences)
    return PairedDifference(
        first_name,
        other_name,
        of,
        len(prompts),
        float(before.mean()),
        float(after.mean()),
        float(differences.mean()),
        low,
        high,
        p,
    )


def signed_rank_p(differences: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """Two-sided p-value; 1 if all differences are 0."""
    from scipy.stats import wilcoxon  # here: half a second of imports, which the report of one run does not need

    if not np.any(differences):
        return 1.0
    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def mean_interval(differences: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    """The 95 % confidence interval of the mean."""
    from scipy.stats import bootstrap

    if np.ptp(differences) == 0.0:
        return float(differences[0]), float(differences[0])
    with warnings.catch_warnings():
        # scipy warns if the sample is so lopsided that the correction is undefined. Then the bounds are NaN.
        warnings.simplefilter("ignore")
        found = bootstrap(
            (differences,), np.mean, n_resamples=RESAMPLES, batch=256, method="BCa", random_state=0
        ).confidence_interval
    if np.isfinite(found.low) and np.isfinite(found.high):
        return float(found.low), float(found.high)
    plain = bootstrap((differences,), np.mean, n_resamples=RESAMPLES, batch=256, method="percentile", random_state=0)
    return float(plain.confidence_interval.low), float(plain.confidence_interval.high)


def late_rewards(record: RunRecord) -> dict[str, float]:
    """Mean reward by group (a prompt in one pass over the data), for groups that ended in the second half of the run.

    Groups of the same name in two runs have the same prompt in the same pass.
    """
    topics = record.facts.topics
    groups = topics.rewards if topics is not None else {}
    return {group: reward for group, (reward, when) in groups.items() if when >= SECOND_HALF}


def held_out_scores(record: RunRecord) -> dict[str, float]:
    """Score by question, from the samples that the evaluation after training kept."""
    found: dict[str, float] = {}
    for row in record.facts.evaluated.get("after", ()):
        score = next((row[name] for name in SCORES if isinstance(row.get(name), bool | int | float)), None)
        question = next((value for value in row.values() if isinstance(value, str)), None)
        if question is not None and isinstance(score, bool | int | float):
            found[question] = float(score)
    return found
