"""The shelf's losses beside their naive counterparts, row by row; ``benchmarks/algorithms`` prints their table.

``computed`` takes the product's own way from rewards to the loss of a batch, cut into any micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.consumers.algorithms.advantages import overlong_penalty
from streamrl.consumers.algorithms.losses import (
    BatchTotals,
    LossSums,
    TokenBatch,
    denominator,
    preference_losses,
    sequence_scores,
    token_losses,
)
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.shelf import Algorithm, algorithm_of
from streamrl.consumers.algorithms.token_credit import StepTensors, terms_by_group, value_losses, whitened
from tests.consumers.algorithms import naive
from tests.consumers.algorithms.naive import (
    Case,
    Cispo,
    Clip,
    Divergence,
    Dppo,
    Reinforce,
    Weighted,
    at_tokens,
    policy_loss,
)
from tests.consumers.algorithms.naive import (
    Sequence as SequenceRatio,
)

WHOLE = (6,)
Naive = Callable[[Case], Tensor]


@dataclass(frozen=True)
class Computed:
    """What the product makes of a case."""

    loss: Tensor
    sums: list[LossSums]
    value_loss: Tensor | None


@dataclass(frozen=True)
class Reference:
    """One row of the table. ``leaf``: what the gradient is taken of."""

    name: str
    settings: Mapping[str, Any]
    naive: Naive
    leaf: str = "pi"

    def errors(self, case: Case) -> tuple[float, float]:
        """The largest difference in value and in gradient."""
        leaf = getattr(case, self.leaf)
        found = computed(case, self.algorithm)
        ours = found.loss if self.leaf == "pi" else found.value_loss
        assert ours is not None
        theirs = self.naive(case)
        gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (ours, theirs)]
        assert gradients[1].abs().max() > 1e-4, "a reference without a gradient would prove nothing"
        return abs(ours.item() - theirs.item()), (gradients[0] - gradients[1]).abs().max().item()

    @property
    def algorithm(self) -> AlgorithmSettings:
        return AlgorithmSettings.model_validate(self.settings)


def computed(case: Case, settings: AlgorithmSettings, sizes: Sequence[int] = WHOLE) -> Computed:
    """The loss of the batch in micro-batches of so many rows."""
    algorithm = algorithm_of(settings)
    scores = torch.tensor(_scores(case, settings, algorithm), dtype=torch.float64)
    parts = [rows[~torch.isnan(scores[rows])] for rows in torch.arange(len(scores)).split(list(sizes))]
    parts = [rows for rows in parts if len(rows)]
    starts = [
        StepTensors(
            scores[rows],
            case.mask[rows],
            case.start[rows],
            case.reference[rows],
            case.teacher[rows],
            case.start_value[rows],
        )
        for rows in parts
    ]
    credits = [algorithm.token_advantages(start) for start in starts]
    advantages = [advantage for advantage, _ in credits]
    if settings.whitens_advantages:
        advantages = whitened(advantages, [start.mask for start in starts])
    batches = [
        TokenBatch(
            case.pi[rows],
            case.mu[rows],
            advantage,
            case.mask[rows],
            case.start[rows] if settings.ratio == "proximal" else None,
            case.reference[rows],
        )
        for rows, advantage in zip(parts, advantages, strict=True)
    ]
    if algorithm.is_pairwise:
        sums = _pairs(case, settings, scores, parts, batches)
    else:
        sums = [token_losses(settings, batch, algorithm.surrogate) for batch in batches]
    totals = BatchTotals(sum(map(len, parts)), int(sum(start.mask.sum() for start in starts)))
    loss = torch.stack([each.loss for each in sums]).sum() / denominator(settings, totals, naive.LONGEST)
    return Computed(loss, sums, _value_loss(case, settings, parts, [returns for _, returns in credits], totals.tokens))


def _scores(case: Case, settings: AlgorithmSettings, algorithm: Algorithm) -> list[float]:
    rewards = np.array(case.flat_rewards)
    if settings.overlong_l_max is not None:
        lengths = np.array([int(row.sum()) for row in case.mask])
        rewards = rewards + overlong_penalty(lengths, l_max=settings.overlong_l_max, l_cache=settings.overlong_l_cache)
    usable = np.ones(3, dtype=np.bool_)
    return [value for group in case.groups for value in algorithm.advantages(rewards[group], usable).tolist()]


def _pairs(
    case: Case, settings: AlgorithmSettings, scores: Tensor, parts: Sequence[Tensor], batches: Sequence[TokenBatch]
) -> list[LossSums]:
    found = [sequence_scores(batch) for batch in batches]
    at_row = {
        row: value
        for rows, each in zip(parts, found, strict=True)
        for row, value in zip(rows.tolist(), each, strict=True)
    }
    better, worse = (
        {str(row // 3): at_row[row].item() for row in at_row if scores[row] == sign} for sign in (1.0, -1.0)
    )
    terms = terms_by_group(settings, better, worse)
    return [
        preference_losses(
            own,
            scores[rows] * torch.tensor([terms[str(row // 3)].slope for row in rows.tolist()], dtype=torch.float64),
            torch.tensor([terms[str(row // 3)].loss / 2 for row in rows.tolist()], dtype=torch.float64),
            batch,
        )
        for rows, own, batch in zip(parts, found, batches, strict=True)
    ]


def _value_loss(
    case: Case, settings: AlgorithmSettings, parts: Sequence[Tensor], returns: Sequence[Tensor | None], tokens: int
) -> Tensor | None:
    losses = [
        value_losses(case.value[rows], case.start_value[rows], own, case.mask[rows], settings.critic.cliprange_value)
        for rows, own in zip(parts, returns, strict=True)
        if own is not None
    ]
    return torch.stack(losses).sum() / tokens if losses else None


def _with_penalty(case: Case) -> Case:
    lengths = [len(case.tokens(row)) for row in range(6)]
    shaped = [reward + naive.overlong(length, 6, 2) for reward, length in zip(case.flat_rewards, lengths, strict=True)]
    return replace(case, rewards=(tuple(shaped[:3]), tuple(shaped[3:])))


def _grouped(token_loss: naive.TokenLoss, average: str, *, scale: bool = True, extra: Any = None) -> Naive:
    return lambda case: policy_loss(
        case, at_tokens(case, naive.group_relative(case, scale=scale)), average, token_loss, extra
    )


def _correction(rule: str, cap: float, floor: float = 0.0) -> Naive:
    return _grouped(Weighted(rule, cap, floor), "token")


def _kl(kind: str, *, weighted: bool) -> Reference:
    settings = {**_GRPO, "beta": 0.3, "kl_estimator": kind, "use_bias_correction_kl": weighted}
    name = f"KL {kind}{', weighted' if weighted else ''}"
    return Reference(name, settings, _grouped(Clip(0.2, 0.2), "sequence", extra=Divergence(kind, 0.3, weighted)))


def _reinforce_plus_plus(case: Case) -> Tensor:
    credit = naive.whiten([naive.discounted(case, row, 0.1, 0.97) for row in range(6)])
    return policy_loss(case, credit, "token", Clip(0.2, 0.2, 2.0))


def _baseline(case: Case) -> Tensor:
    credit = naive.whiten(at_tokens(case, naive.group_relative(case, scale=False)))
    return policy_loss(case, credit, "token", Clip(0.2, 0.2, 2.0))


def _ppo(case: Case) -> Tensor:
    credit = naive.whiten([naive.gae(case, row, 0.98, 0.9)[0] for row in range(6)])
    return policy_loss(case, credit, "token", Clip(0.2, 0.2, 2.0))


_GRPO = {"name": "grpo", "loss_type": "grpo", "epsilon_high": 0.2, "importance_sampling_cap": None}
_PROXIMAL = {"name": "grpo", "ratio": "proximal"}
_PPO = {"name": "ppo", "critic": {"gamma": 0.98, "lam": 0.9, "cliprange_value": 0.2}}

REFERENCES = [
    Reference(
        "GRPO",
        {**_GRPO, "beta": 0.04, "use_bias_correction_kl": False},
        _grouped(Clip(0.2, 0.2), "sequence", extra=Divergence("k3", 0.04, False)),
    ),
    Reference("GRPO as it is by default", {}, _grouped(Clip(0.2, 0.28, 2.0), "token")),
    Reference(
        "Dr. GRPO",
        {"name": "dr_grpo", "importance_sampling_cap": None},
        _grouped(Clip(0.2, 0.2), "constant", scale=False),
    ),
    Reference(
        "DAPO",
        {"name": "dapo", "overlong_l_max": 6, "overlong_l_cache": 2, "importance_sampling_cap": None},
        lambda case: policy_loss(
            case, at_tokens(case, naive.group_relative(_with_penalty(case), scale=True)), "token", Clip(0.2, 0.28)
        ),
    ),
    Reference(
        "GSPO", {"name": "gspo", "epsilon": 0.1, "epsilon_high": 0.15}, _grouped(SequenceRatio(0.1, 0.15), "sequence")
    ),
    Reference("CISPO", {"name": "cispo", "epsilon_high": 0.3}, _grouped(Cispo(0.3), "token")),
    Reference(
        "DPPO",
        {"name": "dppo", "epsilon": 0.1, "epsilon_high": 0.1},
        _grouped(Dppo(0.1, 0.1, 1e-3), "token", scale=False),
    ),
    Reference(
        "RLOO",
        {"name": "rloo"},
        lambda case: policy_loss(case, at_tokens(case, naive.leave_one_out(case)), "token", Clip(0.2, 0.28, 2.0)),
    ),
    Reference(
        "REINFORCE++",
        {"name": "reinforce_plus_plus", "beta": 0.1, "kl_in_reward": True, "critic": {"gamma": 0.97}},
        _reinforce_plus_plus,
    ),
    Reference("REINFORCE++ with a baseline", {"name": "reinforce_plus_plus_baseline"}, _baseline),
    Reference("PPO, the policy", _PPO, _ppo),
    Reference("PPO, the critic", _PPO, lambda case: naive.critic_loss(case, 0.98, 0.9, 0.2), leaf="value"),
    Reference("online DPO", {"name": "dpo"}, lambda case: naive.dpo(case, 0.1)),
    Reference("online DPO, held less", {"name": "dpo", "preference": {"beta": 0.5}}, lambda case: naive.dpo(case, 0.5)),
    Reference("IPO", {"name": "ipo"}, lambda case: naive.ipo(case, 0.1)),
    Reference("rejection sampling", {"name": "rft"}, naive.imitation),
    Reference(
        "on-policy distillation",
        {"name": "distillation", "teacher": {"path": "teacher"}},
        lambda case: policy_loss(case, naive.teacher_credit(case), "token", Reinforce(2.0)),
    ),
    Reference(
        "REINFORCE, weighted",
        {"policy_loss": "reinforce", "importance_sampling_cap": 1.02},
        _grouped(Reinforce(1.02), "token"),
    ),
    Reference("decoupled PPO", {**_PROXIMAL, "importance_sampling_cap": 1.1}, _correction("token_truncate", 1.1)),
    Reference(
        "TIS a sequence",
        {**_PROXIMAL, "importance_sampling_mode": "sequence_truncate", "importance_sampling_cap": 1.2},
        _correction("sequence_truncate", 1.2),
    ),
    Reference(
        "MIS a token",
        {**_PROXIMAL, "importance_sampling_mode": "token_mask", "importance_sampling_cap": 1.2},
        _correction("token_mask", 1.2),
    ),
    Reference(
        "MIS a sequence",
        {**_PROXIMAL, "importance_sampling_mode": "sequence_mask", "importance_sampling_cap": 1.5},
        _correction("sequence_mask", 1.5),
    ),
    Reference(
        "IcePop",
        {
            **_PROXIMAL,
            "importance_sampling_mode": "token_mask",
            "importance_sampling_floor": 0.8,
            "importance_sampling_cap": 1.25,
        },
        _correction("token_mask", 1.25, 0.8),
    ),
    _kl("k1", weighted=True),
    _kl("k2", weighted=False),
    _kl("k2", weighted=True),
    _kl("k3", weighted=True),
]
