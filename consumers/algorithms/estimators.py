"""Advantages from a group's rewards: one number for each sample. Pure numpy.

Sources: GRPO (arXiv 2402.03300) for the group baseline and deviation; Dr. GRPO (arXiv 2503.20783) for leaving the
deviation out; RLOO (arXiv 2402.14740) for the leave-one-out baseline; online DPO (arXiv 2402.04792) for pairs; RAFT
(arXiv 2304.06767) for the best of a group.
"""

import numpy as np
from numpy.typing import NDArray

SCALE_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""

Rewards = NDArray[np.float64]
Usable = NDArray[np.bool_]
"""[G]: which samples may enter the gradient."""


def deviation(rewards: Rewards) -> float:
    """Sample standard deviation (denominator n - 1); 0 for fewer than two rewards, exactly 0 if all are equal."""
    if rewards.size < 2 or np.ptp(rewards) == 0.0:
        return 0.0
    return float(np.std(rewards, ddof=1))


def group_advantages(rewards: Rewards, *, scale: bool) -> Rewards:
    """``R - mean(R)``, divided by ``deviation(R) + 1e-4`` if ``scale``; (G) in, (G) out; equal rewards give zeros."""
    # A special case: the floating-point mean of three 0.1 is not 0.1, and the rounding error would be an advantage
    # other than 0, for which a gradient is computed.
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


def best_against_worst(rewards: Rewards, usable: Usable) -> Rewards:
    """1 for the best usable sample, -1 for the worst, NaN for all others; among equal ones the first. (G) in, (G) out.

    All NaN if there is no pair: fewer than two usable samples, or equal rewards.
    """
    found = np.full_like(rewards, np.nan)
    if usable.sum() < 2 or np.ptp(rewards[usable]) == 0.0:
        return found
    found[np.argmax(np.where(usable, rewards, -np.inf))] = 1.0
    found[np.argmin(np.where(usable, rewards, np.inf))] = -1.0
    return found


def selected_samples(rewards: Rewards, usable: Usable, threshold: float | None) -> Rewards:
    """1 for samples to imitate, NaN for all others: those at or above the threshold, or the best usable one."""
    found = np.full_like(rewards, np.nan)
    if threshold is not None:
        found[rewards >= threshold] = 1.0
        return found
    found[np.argmax(np.where(usable, rewards, -np.inf))] = 1.0  # among equal ones the first
    return found
