"""Predicts which prompts' groups will have no advantage, and decides how often each prompt is ordered. Pure.

If all samples of a group earn the same reward, the group has no advantage, and its samples teach nothing. A group has
m samples, and k of them succeed. For a prompt that was never sampled, the chance of success is taken to be Beta(a, b).
Each earlier group of the prompt adds its k to a, and its m - k to b. Then

    P(no advantage) = P(k = 0) + P(k = m), of the beta-binomial distribution of k.

Three things make this work in a run:

- *Neighbours.* a and b come from alike prompts: prompts of the same data set and about the same length. With these a
  and b, the formulas give the mean reward and the share of groups without advantage that alike prompts had. Each of
  their groups is weighed by 1 / (its probability of being ordered). So prompts that are rarely ordered count as much.
- *Versions.* The policy learns, so a group counts less the further its weights are from the present ones. The same
  holds for another run's groups: those whose weights had as many steps as the present ones count most.
- *Rewards that are not 0 or 1* are scaled to the range seen so far in their data set. If all rewards of a group are
  equal, they count as all right or all wrong, the nearer of the two, because only their equality matters.

A prompt with value v = 1 - P(no advantage) is ordered with probability (v / v')², at most 1 and at least
``LEAST_PROBABILITY``; v' is a high value among the newest groups. So prompts are compared with each other, and if all
are hard, all are ordered. GRESO (arXiv 2506.02177) skips a prompt by its streak of groups without advantage. Here a
group of 8 failures and a group of 7 failures and a success differ little.

Invariants:
- every_prompt_keeps_a_chance: no probability is below ``LEAST_PROBABILITY``, for any history;
- recorded_probability_decides: a prompt is ordered if a number drawn from seed and position alone is below the
  probability that its order carries. So the inverse of that probability weighs samples without bias;
- decisions_depend_on_samples_alone: neither the order in which samples arrive nor repeats change a decision. So a
  restarted dispatcher, which reads the samples again, makes the same decisions as its predecessor.
"""

import math
import random
from bisect import insort
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from streamrl.producers.dispatch.choosing import Decision
from streamrl.schemas.trajectories import FinishedCompletion, OrderingChance, Prompt, total_reward

LEAST_PROBABILITY = 0.05
"""Lowest probability of ordering a prompt. The inverse is the largest weight of a sample; 20 keeps sums of such weights
usable. A prompt that became learnable is found again within 20 passes."""
SHARPNESS = 2.0
"""Power of a prompt's relative value. In simulated learning, 2 needed a tenth fewer samples than 1."""
HIGH_VALUE = 0.75
"""Quantile of the newest groups' values that the values of prompts are compared with."""
RECENT_GROUPS = 64
"""Newest groups whose values are compared: a few steps, so the comparison follows the policy."""
LEAST_GROUPS = 32
"""Groups that must be known before any prompt is passed over: shares of fewer groups are noise."""
HALF_STEPS = 64
"""Optimizer steps after which a group counts half: small policies change about that fast."""
VERSION_BIN = 8
"""Steps whose groups are counted together for neighbours: an eighth of the half-time changes weights by little."""
SHRINKAGE = 8.0
"""Number of groups of alike prompts that together count as much as the whole data set: one group says little."""
STRENGTH = (0.1, 16.0)
"""Smallest and largest a + b of a prior. Above, a prompt's own group of 8 would change little."""
KEPT_GROUPS = 4
"""Groups kept for each prompt, those of the newest weights: older ones say little and take memory."""
MOST_PROMPTS = 200_000
"""Most prompts remembered, about 1 kB each. Beyond that, the prompt that was seen first is forgotten."""
MOST_COUNTED = 1 << 20
"""Newest groups whose repeated samples are recognised, about 100 bytes each."""
_EDGE = 1e-3
"""Least distance of means and shares from 0 and 1, because the formulas have no value there."""


class _Group(NamedTuple):
    """A whole group's outcome. ``weight``: 1 / its probability of being ordered. Sorted by run, then version."""

    is_own: bool
    version: int
    group_id: str
    prompt_id: str
    dataset: str
    alike: str
    samples: int
    mean: float
    is_equal: bool
    weight: float


class PromptValues:
    """What the groups of each prompt earned, and the decisions from it.

    ``reward_weights``: weights of the rewards by name; ``generations``: samples of a group; ``seed``: of the decisions.
    """

    def __init__(self, reward_weights: Mapping[str, float], generations: int, seed: int) -> None:
        self._reward_weights = dict(reward_weights)
        self._generations = generations
        self._seed = seed
        # Rewards by sample number, of groups that are not whole, by run and group.
        self._open: dict[tuple[str, str], dict[int, float | None]] = {}
        self._counted: dict[int, None] = {}  # hashes of run and group
        self._groups: dict[str, dict[tuple[str, str], _Group]] = {}
        # Sums over groups by data set or alike prompts, then by bin of versions: weight, weighted mean, weighted equal.
        self._sums: dict[str, dict[int, tuple[float, float, float]]] = {}
        self._range: dict[str, tuple[float, float]] = {}
        self._recent: list[_Group] = []
        self._priors: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._high: tuple[int, float] | None = None

    @property
    def prompts(self) -> int:
        """Number of prompts with at least one whole group."""
        return len(self._groups)

    def observe(self, sample: FinishedCompletion, run: str = "") -> None:
        """Apply one sample with its rewards; ``run``: the name of an earlier run that made it, empty for this run."""
        key = (run, sample.group_id)
        if sample.source == "request" or hash(key) in self._counted:
            return
        rewards = self._open.setdefault(key, {})
        rewards[sample.sample_index] = total_reward(sample.rewards, self._reward_weights)
        if len(rewards) < sample.num_generations:
            return
        del self._open[key]
        self._counted[hash(key)] = None
        if len(self._counted) > MOST_COUNTED:
            del self._counted[next(iter(self._counted))]
        known = [reward for reward in rewards.values() if reward is not None]
        # The trainer compares the rewards that did not fail, if there are two or more.
        if len(known) > 1:
            self._add(key, sample, known)

    def _add(self, key: tuple[str, str], sample: FinishedCompletion, rewards: list[float]) -> None:
        chance = sample.chance
        group = _Group(
            is_own=not key[0],
            version=sample.admitted_version.number,
            group_id=sample.group_id,
            prompt_id=sample.prompt_id,
            dataset=sample.dataset,
            alike=chance.alike if chance else "",
            samples=len(rewards),
            mean=math.fsum(rewards) / len(rewards),
            is_equal=min(rewards) == max(rewards),
            weight=1 / max(chance.probability, LEAST_PROBABILITY) if chance else 1.0,
        )
        groups = self._groups.setdefault(sample.prompt_id, {})
        groups[key] = group
        if len(groups) > KEPT_GROUPS:
            del groups[min(groups, key=lambda one: groups[one][:3])]
        if len(self._groups) > MOST_PROMPTS:
            del self._groups[next(iter(self._groups))]
        low, high = self._range.get(sample.dataset, (math.inf, -math.inf))
        self._range[sample.dataset] = min(low, *rewards), max(high, *rewards)
        for name in {sample.dataset, group.alike} - {""}:
            bins = self._sums.setdefault(name, {})
            weight, mean, equal = bins.get(place := group.version // VERSION_BIN, (0.0, 0.0, 0.0))
            bins[place] = weight + group.weight, mean + group.weight * group.mean, equal + group.weight * group.is_equal
        insort(self._recent, group)
        del self._recent[:-RECENT_GROUPS]
        self._priors.clear()
        self._high = None

    def decide(self, position: int, prompt: Prompt, version: int) -> Decision:
        """Whether to order the prompt at a position, with the trainer at a version of this number."""
        alike = alike_name(prompt)
        wasted = self._equal_chance(prompt.prompt_id, prompt.dataset, alike, version)
        probability = 1.0
        if len(self._recent) >= LEAST_GROUPS:
            probability = ordering_probability(1 - wasted, self._high_value(version))
        chance = OrderingChance(probability=probability, zero_advantage=wasted, alike=alike)
        return Decision(random.Random(f"{self._seed}/{position}").random() < probability, chance)

    def _equal_chance(self, prompt_id: str, dataset: str, alike: str, version: int) -> float:
        """The chance that all samples of the prompt's next group earn the same."""
        right, wrong = self._prior(dataset, alike, version)
        for group in sorted(self._groups.get(prompt_id, {}).values()):
            weight = closeness(version - group.version) * group.samples
            success = self._scaled(group)
            right += weight * success
            wrong += weight * (1 - success)
        return equal_chance(right, wrong, self._generations)

    def _scaled(self, group: _Group) -> float:
        """A group's mean reward on its data set's range, from 0 to 1; 0 or 1 if all its rewards are equal."""
        low, high = self._range[group.dataset]
        success = (group.mean - low) / (high - low) if high > low else 0.0
        return float(round(success)) if group.is_equal else success

    def _prior(self, dataset: str, alike: str, version: int) -> tuple[float, float]:
        if (found := self._priors.get((dataset, alike, version))) is None:
            mean, equal = 0.5, 0.5
            for name in (dataset, alike):
                weight, sum_means, sum_equal = self._near_sums(name, version)
                low, high = self._range.get(dataset, (0.0, 0.0))
                scaled = (sum_means - weight * low) / (high - low) if high > low else 0.0
                mean = (scaled + SHRINKAGE * mean) / (weight + SHRINKAGE)
                equal = (sum_equal + SHRINKAGE * equal) / (weight + SHRINKAGE)
            found = self._priors[dataset, alike, version] = beta_of(mean, equal, self._generations)
        return found

    def _near_sums(self, name: str, version: int) -> tuple[float, float, float]:
        """The sums of a data set or of alike prompts, each group weighed by how near its version is."""
        found = sorted(self._sums.get(name, {}).items())
        near = [closeness(version - VERSION_BIN * (place + 0.5)) for place, _ in found]
        sums = [math.fsum(by * sums[at] for by, (_, sums) in zip(near, found, strict=True)) for at in range(3)]
        return sums[0], sums[1], sums[2]

    def _high_value(self, version: int) -> float:
        """The value that others are compared with, see ``HIGH_VALUE``."""
        if self._high is None or self._high[0] != version:
            values = sorted(
                1 - self._equal_chance(group.prompt_id, group.dataset, group.alike, version) for group in self._recent
            )
            self._high = version, values[int(HIGH_VALUE * len(values))]
        return self._high[1]


def alike_name(prompt: Prompt) -> str:
    """The name of the prompts that are alike: the same data set, and the same length to a fifth.

    Four classes to each doubling of characters.
    """
    return f"{prompt.dataset[:240]}/{round(4 * math.log2(1 + len(prompt.text)))}"


def ordering_probability(value: float, high: float) -> float:
    """The probability with which a prompt of this value is ordered, if ``high`` is a high value among prompts."""
    relative = min(1.0, value / max(high, _EDGE))
    return max(LEAST_PROBABILITY, math.pow(relative, SHARPNESS))


def closeness(steps: float) -> float:
    """How much a group counts whose weights are so many optimizer steps away: 1 at 0, half at ``HALF_STEPS``."""
    # Not exponential: groups of weights that are 500 steps away should still count a little.
    return 1 / (1 + abs(steps) / HALF_STEPS)


def equal_chance(right: float, wrong: float, samples: int) -> float:
    """P(k = 0) + P(k = samples) of a beta-binomial k.

    P(k = n) = B(a + n, b) / B(a, b) = Π (a + i) / (a + b + i) over i from 0 to n - 1; P(k = 0) the same with b.
    """
    total = right + wrong
    both = 0.0
    for side in (right, wrong):
        chance = 1.0
        for i in range(samples):
            chance *= (side + i) / (total + i)
        both += chance
    return min(1.0, both)


@lru_cache(maxsize=4096)
def beta_of(mean: float, equal: float, samples: int) -> tuple[float, float]:
    """Parameters of the Beta distribution with this mean and this chance of equal rewards, within ``STRENGTH``.

    The chance falls as a + b grows, so bisection finds it.
    """
    mean = min(max(mean, _EDGE), 1 - _EDGE)
    low, high = map(math.log, STRENGTH)
    for _ in range(24):
        middle = (low + high) / 2
        total = math.exp(middle)
        if equal_chance(mean * total, (1 - mean) * total, samples) > equal:
            low = middle
        else:
            high = middle
    total = math.exp((low + high) / 2)
    return mean * total, (1 - mean) * total
