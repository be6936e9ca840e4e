"""The shelf: built-in algorithms by name, and a user's own by import path. Defines each; computes on plain arrays.

An algorithm has three functions: a group's rewards to advantages (``advantages``, numpy), advantages of tokens
(``token_advantages``, torch) and a token's loss (``surrogate``, torch). It also says which models it needs besides the
policy: a reference, a critic, a teacher. Sums, averages, micro-batches, updates, checkpoints and replay are the same
for all. Torch is imported only inside the functions that use it, because the trainer's driver and the settings do not
need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import ValidationError

from streamrl.consumers.algorithms.estimators import (
    Rewards,
    Usable,
    best_against_worst,
    group_advantages,
    leave_one_out_advantages,
    selected_samples,
)
from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings, is_import_path
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.import_path import load_function
from streamrl.schemas.settings import Section

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.consumers.algorithms.losses import TokenBatch
    from streamrl.consumers.algorithms.token_credit import StepTensors


class NoOptions(Section):
    """The options of an algorithm that has none."""


class Algorithm:
    """Group-relative policy gradient: GRPO, Dr. GRPO, DAPO, GSPO, CISPO and DPPO by settings; others extend it.

    ``Options``: the section that checks ``[algorithm.options]`` and becomes ``self.options``. ``unselected``: the
    reason in messages if a sample's advantage is NaN.
    """

    Options: ClassVar[type[Section]] = NoOptions
    unselected: ClassVar[str] = "its advantage is not a number"
    has_critic: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = False
    is_pairwise: ClassVar[bool] = False
    needs_start_logprobs: ClassVar[bool] = False
    """Whether ``token_advantages`` uses the policy's log-probs at the step's start."""

    def __init__(self, settings: AlgorithmSettings, options: Section | None = None) -> None:
        self.settings = settings
        self.options = options if options is not None else self.Options()

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """Advantages of a group's samples: float64 [G] in, [G] out; NaN leaves a sample out of the gradient.

        ``usable`` [G]: which samples may enter the gradient; all others are left out in any case.
        """
        return group_advantages(rewards, scale=self.settings.scale_rewards == "group")

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """Advantages [B, S] at the step's start, and the returns [B, S] that the critic learns, if there is one."""
        from streamrl.consumers.algorithms.token_credit import broadcast

        return broadcast(tensors), None

    def surrogate(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Token losses [B, S], and which tokens were clipped [B, S]: -1 at the floor, 1 at the ceiling, else 0."""
        from streamrl.consumers.algorithms.losses import policy_surrogate

        return policy_surrogate(self.settings, tokens)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the initial model are needed."""
        return self.settings.beta > 0 or self.is_pairwise

    @property
    def has_plain_credit(self) -> bool:
        """Whether all tokens have their sequence's advantage, so that a sequence with advantage 0 has no gradient."""
        kind = type(self)
        is_plain = kind.token_advantages is Algorithm.token_advantages and kind.surrogate is Algorithm.surrogate
        return is_plain and not self.settings.whitens_advantages

    @property
    def is_separable(self) -> bool:
        """Whether a step's gradient is a sum over sequences: one update, and each sequence's credit is independent."""
        settings = self.settings
        is_independent = not (self.has_critic or self.is_pairwise or settings.whitens_advantages)
        return is_independent and settings.updates_per_step == 1


class LeaveOneOut(Algorithm):
    """RLOO (arXiv 2402.14740)."""

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """Each reward minus the mean of the other rewards."""
        return leave_one_out_advantages(rewards)


class ReturnsToGo(Algorithm):
    """REINFORCE++ (arXiv 2501.03262): the sum of rewards from each token on, whitened over the batch."""

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """The unchanged rewards."""
        return rewards.copy()

    @property
    def needs_start_logprobs(self) -> bool:  # type: ignore[override]
        """True only for a KL in the reward."""
        return self.settings.kl_in_reward

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """Returns from each token on: GAE without a critic and with lambda 1."""
        import torch

        from streamrl.consumers.algorithms.token_credit import generalised_advantages, token_rewards

        rewards = token_rewards(tensors, self.settings.beta if self.settings.kl_in_reward else 0.0)
        gamma = self.settings.critic.gamma
        found, _ = generalised_advantages(rewards, torch.zeros_like(rewards), tensors.mask, gamma, 1.0)
        return found, None


class ReturnsOverBaseline(Algorithm):
    """REINFORCE++ with a baseline (arXiv 2501.03262): rewards minus the group's mean, whitened over the batch."""

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """Rewards minus the group's mean, not scaled."""
        return group_advantages(rewards, scale=False)


class ActorCritic(ReturnsToGo):
    """PPO (arXiv 1707.06347) with a learned critic and GAE (arXiv 1506.02438)."""

    has_critic = True

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """GAE over the critic's values."""
        from streamrl.consumers.algorithms.token_credit import generalised_advantages, token_rewards

        assert tensors.values is not None
        critic = self.settings.critic
        rewards = token_rewards(tensors, self.settings.beta if self.settings.kl_in_reward else 0.0)
        return generalised_advantages(rewards, tensors.values, tensors.mask, critic.gamma, critic.lam)


class PreferencePairs(Algorithm):
    """Online DPO (arXiv 2402.04792) and IPO (arXiv 2310.12036): a group's best sample against its worst."""

    is_pairwise = True
    needs_start_logprobs = True
    unselected = "neither the best nor the worst of its group"

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """1 for the best sample, -1 for the worst, NaN for all others."""
        return best_against_worst(rewards, usable)


class RejectionSampling(Algorithm):
    """Fine-tuning on the best samples (RAFT, arXiv 2304.06767): the loss is -log pi of the selected samples."""

    unselected = "not among the samples that algorithm.selection keeps"

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """1 for the selected samples, NaN for all others."""
        return selected_samples(rewards, usable, self.settings.selection.threshold)


class TeacherCredit(Algorithm):
    """On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543): minus the reverse KL at each token.

    Rewards are ignored.
    """

    has_teacher = True
    needs_start_logprobs = True

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """1 for all samples: the teacher gives the tokens' credit."""
        return np.ones_like(rewards)

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """-(log pi0 - log teacher)."""
        from streamrl.consumers.algorithms.token_credit import reverse_kl_to_teacher

        return -reverse_kl_to_teacher(tensors), None


ALGORITHMS: dict[str, type[Algorithm]] = dict.fromkeys(PRESETS, Algorithm) | {
    "rloo": LeaveOneOut,
    "reinforce_plus_plus": ReturnsToGo,
    "reinforce_plus_plus_baseline": ReturnsOverBaseline,
    "ppo": ActorCritic,
    "dpo": PreferencePairs,
    "ipo": PreferencePairs,
    "rft": RejectionSampling,
    "distillation": TeacherCredit,
}
"""Classes by name. Six algorithms are ``Algorithm`` itself with other defaults."""


def algorithm_of(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that the settings name.

    Raises:
        SettingsError: a user's own cannot be imported, is no ``Algorithm``, or refuses ``[algorithm.options]``.
    """
    kind = ALGORITHMS.get(settings.name) or _load_own(settings.name)
    try:
        options = kind.Options.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(("algorithm.options", *(str(part) for part in first["loc"])))
        known = ", ".join(kind.Options.model_fields) or "none"
        raise SettingsError(
            f"expected {key} to be valid for {settings.name} (its options: {known}), got: {first['msg']}"
        ) from error
    return kind(settings, options)


def _load_own(name: str) -> type[Algorithm]:
    assert is_import_path(name), "settings refuse other names"
    found: object = load_function(name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise SettingsError(
            f"expected {name} to be a class that extends streamrl.Algorithm, got {type(found).__name__}; "
            "see docs/algorithms.md"
        )
    return found
