"""The shelf: algorithms by name, or a user's own by import path. Says what each is made of; computes on plain arrays.

An algorithm is three things: what a group of rewards is worth (``advantages``, numpy), what each token gets of it
(``token_advantages``) and a token's loss (``surrogate``, both torch); and what it needs beside the policy: a reference,
a critic, a teacher. Sums, averages, micro-batches, updates, checkpoints and replay are the same for all of them. Torch
is imported by the parts that compute with it, not here: the trainer's driver and the settings do without.
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
    """An algorithm without settings of its own."""


class Algorithm:
    """Group-relative policy gradient, and what others vary: GRPO, Dr. GRPO, DAPO, GSPO, CISPO and DPPO by settings.

    ``Options``: the section that ``[algorithm.options]`` is checked against, for ``self.options``. ``unselected``: why
    a sample stays out whose advantage is NaN.
    """

    Options: ClassVar[type[Section]] = NoOptions
    unselected: ClassVar[str] = "its advantage is not a number"
    has_critic: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = False
    is_pairwise: ClassVar[bool] = False
    needs_start_logprobs: ClassVar[bool] = False
    """Whether ``token_advantages`` looks at log-probs of the policy at the step's start."""

    def __init__(self, settings: AlgorithmSettings, options: Section | None = None) -> None:
        self.settings = settings
        self.options = options if options is not None else self.Options()

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """What each sample of a group is worth: float64 [G] in, [G] out; NaN keeps a sample out of the gradient.

        ``usable`` [G]: which samples may enter the gradient; others are left out whatever is said of them.
        """
        return group_advantages(rewards, scale=self.settings.scale_rewards == "group")

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """Advantages [B, S] at the step's start, and the returns that a critic learns, if there is one."""
        from streamrl.consumers.algorithms.token_credit import broadcast

        return broadcast(tensors), None

    def surrogate(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Token losses [B, S], and which tokens were clipped [B, S]: -1 at the floor, 1 at the ceiling, else 0."""
        from streamrl.consumers.algorithms.losses import policy_surrogate

        return policy_surrogate(self.settings, tokens)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the initial model are looked at."""
        return self.settings.beta > 0 or self.is_pairwise

    @property
    def has_plain_credit(self) -> bool:
        """Whether a token's advantage is its sequence's, and a sequence with advantage 0 has no gradient."""
        kind = type(self)
        is_plain = kind.token_advantages is Algorithm.token_advantages and kind.surrogate is Algorithm.surrogate
        return is_plain and not self.settings.whiten_advantages

    @property
    def is_separable(self) -> bool:
        """Whether a step's gradient is the sum of its sequences' own: one update, of credit that needs no others."""
        settings = self.settings
        alone = not (self.has_critic or self.is_pairwise or settings.whiten_advantages)
        return alone and settings.updates_per_step == 1


class LeaveOneOut(Algorithm):
    """RLOO (arXiv 2402.14740)."""

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """Rewards less the mean of the others'."""
        return leave_one_out_advantages(rewards)


class ReturnsToGo(Algorithm):
    """REINFORCE++ (arXiv 2501.03262): the reward from each token on, whitened over the batch."""

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """The rewards themselves."""
        return rewards.copy()

    @property
    def needs_start_logprobs(self) -> bool:  # type: ignore[override]
        """Only for a KL in the reward."""
        return self.settings.kl_in_reward

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """GAE without a critic and with lambda 1 is the sum of what comes."""
        import torch

        from streamrl.consumers.algorithms.token_credit import generalised_advantages, token_rewards

        rewards = token_rewards(tensors, self.settings.beta if self.settings.kl_in_reward else 0.0)
        gamma = self.settings.critic.gamma
        found, _ = generalised_advantages(rewards, torch.zeros_like(rewards), tensors.mask, gamma, 1.0)
        return found, None


class ReturnsOverBaseline(Algorithm):
    """REINFORCE++ with a baseline (arXiv 2501.03262): rewards less the group's mean, whitened over the batch."""

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """Centred, divided by nothing."""
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
        """1 for the better, -1 for the worse."""
        return best_against_worst(rewards, usable)


class RejectionSampling(Algorithm):
    """Fine-tuning on the best samples (RAFT, arXiv 2304.06767): -log pi of what is kept."""

    unselected = "not among the samples that algorithm.selection keeps"

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """1 for what is kept."""
        chosen = self.settings.selection
        return selected_samples(rewards, usable, threshold=chosen.threshold, keep_best=chosen.keep_best)


class TeacherCredit(Algorithm):
    """On-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543): minus the reverse KL at each token.

    Rewards are not looked at.
    """

    has_teacher = True
    needs_start_logprobs = True

    def advantages(self, rewards: Rewards, usable: Usable) -> Rewards:
        """The same for all: what a token is worth, the teacher says."""
        return np.ones_like(rewards)

    def token_advantages(self, tensors: StepTensors) -> tuple[Tensor, Tensor | None]:
        """-kl_coef (log pi0 - log teacher)."""
        from streamrl.consumers.algorithms.token_credit import reverse_kl_to_teacher

        return -self.settings.teacher.kl_coef * reverse_kl_to_teacher(tensors), None


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
"""By name. Six of them are ``Algorithm`` with other defaults."""


def algorithm_of(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that the settings name.

    Raises:
        SettingsError: a user's own cannot be imported, is no ``Algorithm``, or does not take ``[algorithm.options]``.
    """
    kind = ALGORITHMS.get(settings.name) or _own(settings.name)
    try:
        options = kind.Options.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(("algorithm.options", *(str(part) for part in first["loc"])))
        known = ", ".join(kind.Options.model_fields) or "none"
        raise SettingsError(
            f"expected {key} as {settings.name} takes it (it has {known}), got: {first['msg']}"
        ) from error
    return kind(settings, options)


def _own(name: str) -> type[Algorithm]:
    assert is_import_path(name), "settings refuse other names"
    found: object = load_function(name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise SettingsError(
            f"expected {name} to be a class that extends streamrl.Algorithm, got {type(found).__name__}; "
            "see docs/algorithms.md"
        )
    return found
