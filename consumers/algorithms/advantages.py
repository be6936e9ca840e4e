"""Turns a group into training samples: shaped rewards → advantages, and the samples that are left out, with reasons.

Knows no policy and no tensors. The algorithm turns rewards into advantages (``shelf.py``). The overlong penalty is
DAPO's (arXiv 2503.14476).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.consumers.algorithms.estimators import Rewards, deviation
from streamrl.consumers.algorithms.settings import PAIRWISE, AlgorithmSettings
from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.consumers.batching.micro_batches import Group, Sample, TrainingSample
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import FinishReason


def overlong_penalty(lengths: NDArray[np.int64], *, l_max: int, l_cache: int) -> Rewards:
    """Penalty (<= 0) by completion length in tokens: none up to l_max - l_cache, then linear, -1 from l_max on."""
    over: Rewards = (lengths - (l_max - l_cache)) / l_cache  # 0 at l_max - l_cache, 1 at l_max
    penalty: Rewards = -np.clip(over, 0.0, 1.0)
    return penalty


@dataclass(frozen=True)
class ModelLimits:
    """The model's limits: token ids below ``vocabulary``, sequences of at most ``positions`` tokens."""

    vocabulary: int
    positions: int


@dataclass(frozen=True)
class Credit:
    """The credit of a group. ``training_samples`` enter the gradient; ``left_out`` do not, each with its reason.

    ``rewards`` float64 [G]: the shaped rewards of all samples. ``deviation``: their standard deviation, 0 if all are
    equal.
    """

    training_samples: tuple[TrainingSample, ...]
    left_out: tuple[tuple[Sample, str], ...]
    rewards: Rewards
    deviation: float


def credit_group(group: Group, settings: AlgorithmSettings, limits: ModelLimits) -> Credit:
    """Compute advantages over all samples of the group, then leave out samples that cannot or should not be trained."""
    rewards = np.array([sample.reward for sample in group.samples], dtype=np.float64)
    if settings.overlong_l_max is not None:
        lengths = np.array([sample.trajectory.sampled_tokens for sample in group.samples], dtype=np.int64)
        rewards = rewards + overlong_penalty(lengths, l_max=settings.overlong_l_max, l_cache=settings.overlong_l_cache)
    algorithm = algorithm_of(settings)
    excluded = [_exclusion(sample, settings, limits) for sample in group.samples]
    usable = np.array([detail is None for detail in excluded], dtype=np.bool_)
    # From all rewards: that of a truncated sample, which is left out, still says how hard the prompt is.
    advantages = algorithm.advantages(rewards, usable)
    kept: list[TrainingSample] = []
    left_out: list[tuple[Sample, str]] = []
    for sample, advantage, detail in zip(group.samples, advantages.tolist(), excluded, strict=True):
        if detail is None and not math.isnan(advantage):
            kept.append(TrainingSample(sample, advantage))
        else:
            left_out.append((sample, detail or algorithm.unselected))
    return Credit(tuple(kept), tuple(left_out), rewards, deviation(rewards))


def skip_reason_of(credit: Credit, settings: AlgorithmSettings) -> tuple[SkipReason, str] | None:
    """Why a group enters no step; None if it does."""
    if (settings.dynamic_sampling or settings.name in PAIRWISE) and credit.deviation == 0.0:
        return SkipReason.ZERO_ADVANTAGE, f"all rewards of the group are equal: {credit.rewards[0]:g}"
    if not credit.training_samples:
        return SkipReason.FILTERED, credit.left_out[0][1]
    return None


def _exclusion(sample: Sample, settings: AlgorithmSettings, limits: ModelLimits) -> str | None:
    trajectory = sample.trajectory
    if not trajectory.loss_mask.any():
        return "the completion has no token to train"
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
