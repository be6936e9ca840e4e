"""Two runs on the same prompts: how much better one is, how sure that is, and whether it may be chance. Pure.

Each prompt gives one difference, so what makes some prompts harder than others cancels. Of the differences:

- p: the Wilcoxon signed-rank test, two-sided, zeros by Pratt (F. Wilcoxon, Individual Comparisons by Ranking Methods,
  Biometrics Bulletin 1, 1945), as ``scipy.stats.wilcoxon`` computes it: the chance of ranks so lopsided, or more, if a
  difference were as likely up as down. Rewards are bounded, tied and skewed, and it assumes no shape of them;
- the interval: of the mean difference, at 95 %, by the bias-corrected and accelerated bootstrap (B. Efron, Better
  Bootstrap Confidence Intervals, JASA 82, 1987), as ``scipy.stats.bootstrap`` computes it, from a fixed seed.

Prompts are taken to be independent of each other. The samples of one prompt are not, so their mean counts once.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from streamrl.inspection.report.record import RunRecord

LEAST_PAIRS = 6
"""Below, no outcome of the test is under 5 %: 2 / 2^5 is 6 %."""
LEVEL = 0.05
RESAMPLES = 4999
SECOND_HALF = 0.5
SCORES = ("correct", "reward", "score")
"""Columns of held-out samples that are a number or yes and no for each question, the first that is there."""


class PairedDifference(NamedTuple):
    """Run ``other`` against run ``first``: means over ``prompts``, their difference (other - first) with its interval.

    ``of``: what was paired. ``p`` None: there are too few prompts to say.
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
        """Whether chance alone would do this in less than 5 % of the cases."""
        return self.p is not None and self.p < LEVEL

    @property
    def text(self) -> str:
        """In a line."""
        said = f"{self.of}: {self.other} {self.difference:+.4g} against {self.first} on {self.prompts:,} prompts"
        if self.p is None or self.low is None or self.high is None:
            return f"{said}; too few to judge"
        verdict = "a difference" if self.is_significant else "no difference that chance would not make"
        return f"{said}, 95 % interval {self.low:+.3g} to {self.high:+.3g}, p {shown_p(self.p)}: {verdict}"


def shown_p(p: float) -> str:
    """As papers write it."""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.2f}"


def paired_differences(records: Sequence[RunRecord]) -> list[PairedDifference]:
    """Every run against the first one, of whatever both tell for the same prompts."""
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
    """Of two runs, each a name and its values by prompt; None if they have no prompt in common."""
    (first_name, ours), (other_name, theirs) = first, other
    # In one order, so that the interval is the same whenever it is computed.
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
    """Two-sided; 1 where nothing differs."""
    from scipy.stats import wilcoxon  # half a second of imports, which the report of one run does not need

    if not np.any(differences):
        return 1.0
    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def mean_interval(differences: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    """Of the mean, at 95 %."""
    from scipy.stats import bootstrap

    if np.ptp(differences) == 0.0:
        return float(differences[0]), float(differences[0])
    with warnings.catch_warnings():
        # Of a sample so lopsided that the correction is not defined; the bounds are NaN then.
        warnings.simplefilter("ignore")
        found = bootstrap(
            (differences,), np.mean, n_resamples=RESAMPLES, batch=256, method="BCa", random_state=0
        ).confidence_interval
    if np.isfinite(found.low) and np.isfinite(found.high):
        return float(found.low), float(found.high)
    plain = bootstrap((differences,), np.mean, n_resamples=RESAMPLES, batch=256, method="percentile", random_state=0)
    return float(plain.confidence_interval.low), float(plain.confidence_interval.high)


def late_rewards(record: RunRecord) -> dict[str, float]:
    """Mean reward by group (a prompt in one pass over the data) of those that ended in the second half of the run.

    Both runs sampled the same prompt in the same pass, each with the policy that it had by then.
    """
    topics = record.facts.topics
    groups = topics.rewards if topics is not None else {}
    return {group: reward for group, (reward, when) in groups.items() if when >= SECOND_HALF}


def held_out_scores(record: RunRecord) -> dict[str, float]:
    """Score by question, of the samples that the evaluation at the end kept."""
    found: dict[str, float] = {}
    for row in record.facts.evaluated.get("after", ()):
        score = next((row[name] for name in SCORES if isinstance(row.get(name), bool | int | float)), None)
        question = next((value for value in row.values() if isinstance(value, str)), None)
        if question is not None and isinstance(score, bool | int | float):
            found[question] = float(score)
    return found
