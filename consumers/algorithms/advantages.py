"""Turns a group into training samples: shaped rewards → advantages, and which samples stay out and why.

Pure numpy: knows no policy. Sources: GRPO (arXiv 2402.03300) for the group baseline and deviation, Dr. GRPO (arXiv
2503.20783) for leaving the deviation out, RLOO (arXiv 2402.14740) for the leave-one-out baseline, DAPO (arXiv
2503.14476) for the overlong penalty.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batches import Group, Sample, TrainingSample
from schemas.reports import SkipReason
from schemas.trajectories import FinishReason

SCALE_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""

Rewards = NDArray[np.float64]


def deviation(rewards: Rewards) -> float:
    """Sample standard deviation (denominator n - 1); 0 for fewer than two rewards, exactly 0 if all are equal."""
    if rewards.size < 2 or np.ptp(rewards) == 0.0:
        return 0.0
    return float(np.std(rewards, ddof=1))


def group_advantages(rewards: Rewards, *, scale: bool) -> Rewards:
    """``R - mean(R)``, divided by ``deviation(R) + 1e-4`` if ``scale``; (G) in, (G) out; equal rewards give zeros."""
    # Not left to the subtraction: the floating-point mean of three 0.1 is not 0.1, and what rounding leaves would be
    # an advantage other than 0, for which a gradient is computed.
    if rewards.size == 0 or np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred / (deviation(rewards) + SCALE_EPSILON) if scale else centred


def leave_one_out_advantages(rewards: Rewards) -> Rewards:
    """``R_i - mean of the other rewards``; (G) in, (G) out; zeros for fewer than two rewards or equal ones."""
    if rewards.size < 2 or np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    others: Rewards = (rewards.sum() - rewards) / (rewards.size - 1)
    return rewards - others


def overlong_penalty(lengths: NDArray[np.int64], *, l_max: int, l_cache: int, factor: float) -> Rewards:
    """Penalty (<= 0) by completion length in tokens: none up to l_max - l_cache, then linear, -factor from l_max on."""
    over: Rewards = (lengths - (l_max - l_cache)) / l_cache  # 0 at l_max - l_cache, 1 at l_max
    penalty: Rewards = -factor * np.clip(over, 0.0, 1.0)
    return penalty


@dataclass(frozen=True)
class ModelLimits:
    """What the model can take: token ids below ``vocabulary``, sequences of at most ``positions`` tokens."""

    vocabulary: int
    positions: int


@dataclass(frozen=True)
class Credit:
    """``training_samples`` go into the gradient, ``left_out`` do not, each with the reason in words.

    ``rewards`` float64 (G): the shaped rewards of all samples; ``deviation`` of them, 0 if they are all equal.
    """

    training_samples: tuple[TrainingSample, ...]
    left_out: tuple[tuple[Sample, str], ...]
    rewards: Rewards
    deviation: float


def credit_group(group: Group, settings: AlgorithmSettings, limits: ModelLimits) -> Credit:
    """Advantages over all samples of the group; those that cannot be or are not to be trained then stay out."""
    rewards = np.array([sample.reward for sample in group.samples], dtype=np.float64)
    if settings.overlong_l_max is not None:
        lengths = np.array([len(sample.trajectory.token_ids) for sample in group.samples], dtype=np.int64)
        rewards = rewards + overlong_penalty(
            lengths, l_max=settings.overlong_l_max, l_cache=settings.overlong_l_cache, factor=settings.overlong_factor
        )
    # Before anything is left out: a truncated sample's reward still tells how hard the prompt is.
    advantages = _advantages(rewards, settings)
    kept: list[TrainingSample] = []
    left_out: list[tuple[Sample, str]] = []
    for sample, advantage in zip(group.samples, advantages.tolist(), strict=True):
        if (detail := _exclusion(sample, settings, limits)) is None:
            kept.append(TrainingSample(sample, advantage))
        else:
            left_out.append((sample, detail))
    return Credit(tuple(kept), tuple(left_out), rewards, deviation(rewards))


def _advantages(rewards: Rewards, settings: AlgorithmSettings) -> Rewards:
    if settings.name == "rloo":
        return leave_one_out_advantages(rewards)
    return group_advantages(rewards, scale=settings.scale_rewards == "group")


def skip_reason_of(credit: Credit, settings: AlgorithmSettings) -> tuple[SkipReason, str] | None:
    """Why none of a group goes into a step, or none if it does."""
    if settings.dynamic_sampling and credit.deviation == 0.0:
        return SkipReason.ZERO_ADVANTAGE, "all rewards of the group are equal"
    if not credit.training_samples:
        return SkipReason.FILTERED, credit.left_out[0][1]
    return None


def _exclusion(sample: Sample, settings: AlgorithmSettings, limits: ModelLimits) -> str | None:
    trajectory = sample.trajectory
    if not trajectory.loss_mask.any():
        return "no token of the completion is to be trained"
    if settings.mask_truncated_completions and trajectory.finish_reason is FinishReason.LENGTH:
        return f"truncated at {len(trajectory.token_ids)} tokens and algorithm.mask_truncated_completions is on"
    length = len(trajectory.prompt_token_ids) + len(trajectory.token_ids)
    if length > limits.positions:
        return f"expected at most {limits.positions} tokens, the model's positions, got {length}"
    largest = max(int(trajectory.prompt_token_ids.max(initial=0)), int(trajectory.token_ids.max(initial=0)))
    if largest >= limits.vocabulary:
        return f"expected token ids below {limits.vocabulary}, the model's vocabulary, got {largest}"
    if trajectory.temperature <= 0:
        return f"expected a sampling temperature above 0, got {trajectory.temperature}"
    return None
