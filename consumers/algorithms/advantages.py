"""Advantages of the samples of one prompt, from their rewards. Pure numpy: knows no tokens and no policy.

Sources: GRPO (arXiv 2402.03300) for the group baseline and deviation, Dr. GRPO (arXiv 2503.20783) for leaving the
deviation out, RLOO (arXiv 2402.14740) for the leave-one-out baseline, DAPO (arXiv 2503.14476) for the overlong penalty.
"""

import numpy as np
from numpy.typing import NDArray

SCALE_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""

Rewards = NDArray[np.float64]


def deviation(rewards: Rewards) -> float:
    """Sample standard deviation (n - 1 below the line); 0 for fewer than two rewards, exactly 0 if all are equal."""
    if rewards.size < 2 or np.ptp(rewards) == 0.0:
        return 0.0
    return float(np.std(rewards, ddof=1))


def group_advantages(rewards: Rewards, *, scale: bool) -> Rewards:
    """``R - mean(R)``, divided by ``deviation(R) + 1e-4`` if ``scale``; (G) in, (G) out; equal rewards give zeros."""
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
    over: Rewards = (lengths - (l_max - l_cache)) / l_cache
    penalty: Rewards = -factor * np.clip(over, 0.0, 1.0)
    return penalty
