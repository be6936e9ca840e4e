"""Credit of single tokens, from a critic, a teacher or the other sequence of a pair; tensors of one step.

Everything here is computed once a step, or once an update, and held fixed while losses are differentiated. Knows no
model. B rows of S positions; values of tokens that are not trained are 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.consumers.algorithms.settings import AlgorithmSettings

WHITENING_EPSILON = 1e-8
"""Added to a variance before dividing by its square root, as verl and OpenRLHF do."""


@dataclass(frozen=True)
class StepTensors:
    """Tensors of a micro-batch at the start of a step, without gradients; those that are not needed are None.

    ``scores`` [B]: each sequence's credit from its group; ``mask`` [B, S]. Log-probs [B, S] of the policy, the
    reference and the teacher. ``values`` [B, S]: the critic's, of the state before each token. ``turn_rewards`` [B, S]:
    the parts of the scores that belong to turns, at each turn's last token.
    """

    scores: Tensor
    mask: Tensor
    start_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    turn_rewards: Tensor | None = None


def broadcast(tensors: StepTensors) -> Tensor:
    """A sequence's advantage at each of its trained tokens, [B, S]."""
    return tensors.scores.unsqueeze(1) * tensors.mask


def token_rewards(tensors: StepTensors, kl_coef: float) -> Tensor:
    """A sequence's reward at its last trained token, minus ``kl_coef`` (log pi0 - log ref) at each token; [B, S].

    A turn's reward is at the turn's last token, and the rest of the reward at the sequence's last trained token.
    """
    mask = tensors.mask
    # The last position with a 1: the largest position among trained tokens.
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask > 0, positions, -1).max(dim=1, keepdim=True).values
    at_end = tensors.scores
    if tensors.turn_rewards is not None:
        at_end = at_end - tensors.turn_rewards.sum(dim=1)
    rewards = torch.where((positions == last) & (mask > 0), at_end.unsqueeze(1), 0.0).to(mask.dtype)
    if tensors.turn_rewards is not None:
        rewards = rewards + tensors.turn_rewards
    if kl_coef:
        assert tensors.start_logprobs is not None
        assert tensors.reference_logprobs is not None
        rewards = rewards - kl_coef * torch.where(mask > 0, tensors.start_logprobs - tensors.reference_logprobs, 0.0)
    return rewards


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv 1506.02438): advantages and returns, [B, S] each.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t; after the last token V
    and A are 0. t counts only trained tokens: an environment's tokens in between are not actions, and are skipped.
    """
    advantages = torch.zeros_like(rewards)
    advantage = next_value = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        is_trained = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(is_trained, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(is_trained, values[:, t], next_value)
        advantages[:, t] = torch.where(is_trained, advantage, 0.0)
    return advantages, torch.where(mask > 0, advantages + values, 0.0)


def reverse_kl_to_teacher(tensors: StepTensors) -> Tensor:
    """Log pi0 - log teacher at each trained token, [B, S]: one sample of KL(pi || teacher) given the earlier tokens."""
    assert tensors.start_logprobs is not None
    assert tensors.teacher_logprobs is not None
    return torch.where(tensors.mask > 0, tensors.start_logprobs - tensors.teacher_logprobs, 0.0)


def whitened(advantages: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """(A - mean) / sqrt(variance + 1e-8) over all trained tokens of the batch; variance with denominator n - 1.

    Summed in float64, so that the split into micro-batches changes only the last bits of float64.
    """
    found = [advantage[mask > 0].double() for advantage, mask in zip(advantages, masks, strict=True)]
    count = sum(each.numel() for each in found)
    if count < 2:
        return list(advantages)
    mean = torch.stack([each.sum() for each in found]).sum() / count
    variance = torch.stack([(each - mean).square().sum() for each in found]).sum() / (count - 1)
    scale = torch.rsqrt(variance + WHITENING_EPSILON)
    return [
        torch.where(mask > 0, ((advantage.double() - mean) * scale).to(advantage.dtype), 0.0)
        for advantage, mask in zip(advantages, masks, strict=True)
    ]


def value_losses(values: Tensor, start_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """Sum over trained tokens of max((V - G)^2, (clip(V, V0 - c, V0 + c) - G)^2) / 2, PPO's clipped value loss."""
    errors = (values - returns).square()
    if clip is not None:
        near = start_values + (values - start_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return torch.where(mask > 0, errors, 0.0).sum() / 2


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(G - V) / Var(G) over tokens [N].

    1 for a critic that predicts returns exactly, 0 for one that predicts their mean; NaN if all returns are equal.
    """
    spread = float(returns.var(correction=0)) if returns.numel() else 0.0
    return 1 - float((returns - values).var(correction=0)) / spread if spread > 0 else float("nan")


@dataclass(frozen=True)
class PairTerms:
    """A pair's loss, and its derivative by the margin h = score(better) - score(worse)."""

    margin: float
    loss: float
    slope: float


def pair_terms(settings: AlgorithmSettings, margin: float) -> PairTerms:
    """The loss of a pair with this margin, and its slope.

    DPO (arXiv 2305.18290): -log sigmoid(b h).
    IPO (arXiv 2310.12036): (h - 1 / (2 b))^2.
    """
    beta = settings.preference.beta
    if settings.name == "ipo":
        gap = margin - 1 / (2 * beta)
        return PairTerms(margin, gap * gap, 2 * gap)
    logit = torch.tensor(beta * margin, dtype=torch.float64)
    right, wrong = torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)
    # d/dh -log sigmoid(b h) = -b sigmoid(-b h)
    return PairTerms(margin, float(-right), float(-beta * torch.exp(wrong)))


def terms_by_group(
    settings: AlgorithmSettings, better: Mapping[str, float], worse: Mapping[str, float]
) -> dict[str, PairTerms]:
    """Pair terms by group, for groups that have both sequences; ``better`` and ``worse``: scores by group."""
    return {name: pair_terms(settings, better[name] - worse[name]) for name in better if name in worse}
