"""``[algorithm]``: the algorithm's name and its settings. Knows no tensors and no other module.

Each name has its own defaults (``PRESETS``), from its paper or from other libraries, where they differ from the field's
default. A user's own algorithm, named by import path, has the fields' defaults, and reads ``[algorithm.options]``.
"""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from streamrl.schemas.settings import Section

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.2},
    "dapo": {"dynamic_sampling": True},
    "gspo": {"policy_loss": "gspo", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"policy_loss": "cispo", "epsilon": 1.0, "epsilon_high": 4.0, "importance_sampling_cap": None},
    "dppo": {
        "policy_loss": "dppo",
        "epsilon_high": 0.2,
        "importance_sampling_cap": None,
        "scale_rewards": "none",
    },
    "rloo": {},
    "reinforce_plus_plus": {"scale_rewards": "none", "epsilon_high": 0.2},
    "reinforce_plus_plus_baseline": {"scale_rewards": "none", "epsilon_high": 0.2},
    "ppo": {"scale_rewards": "none", "epsilon_high": 0.2},
    "dpo": {"scale_rewards": "none", "importance_sampling_mode": "none"},
    "ipo": {"scale_rewards": "none", "importance_sampling_mode": "none"},
    "rft": {"policy_loss": "reinforce", "scale_rewards": "none", "importance_sampling_mode": "none"},
    "distillation": {"policy_loss": "reinforce", "scale_rewards": "none"},
}
"""By algorithm: the defaults that differ from the fields' defaults."""

ALIASES = {
    "drgrpo": "dr_grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
    "reinforce++-baseline": "reinforce_plus_plus_baseline",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "gae": "ppo",
    "online_dpo": "dpo",
    "raft": "rft",
    "rejection_sampling": "rft",
    "sft": "rft",
    "gkd": "distillation",
    "opd": "distillation",
}
"""Names in other libraries, for hints in messages."""
PAIRWISE = frozenset({"dpo", "ipo"})
"""Algorithms that compare the two sequences of a pair."""
WITHOUT_A_GROUP = frozenset({"ppo", "reinforce_plus_plus", "rft", "distillation"})
"""Algorithms that also learn from a group of one."""
CENTRED = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "rloo"})
"""Algorithms whose advantages are rewards minus a baseline of the group."""
WHITENED = frozenset({"ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Algorithms that scale the advantages of all trained tokens of the batch to mean 0 and deviation 1."""
BY_RETURNS = frozenset({"ppo", "reinforce_plus_plus"})
"""Algorithms that place rewards at tokens and sum them to returns."""
LOG_RATIO_PENALTY = 1e-3
"""With ``policy_loss`` dppo: weight of log(policy / behaviour policy) squared in each token's loss, as in its paper."""


def is_import_path(name: str) -> bool:
    """Whether a name is the import path of a user's own algorithm, ``package.module:Class``."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def lone_refusal(name: str) -> str:
    """Why an algorithm learns nothing from a group of one, and what to do; empty: it may learn something."""
    if name in WITHOUT_A_GROUP or is_import_path(name):
        return ""
    return (
        f"{name} compares the completions of a prompt, so a single one has an advantage of 0; ask for n of 2 or more, "
        "or set algorithm.name to reinforce_plus_plus"
    )


class CriticSettings(Section):
    """``[algorithm.critic]``: the value model of ``ppo``. Names follow TRL where it has one."""

    trunk: Annotated[
        Literal["policy", "own"],
        Field(
            description="The value head's input: the policy's hidden states, which its gradient does not change, or a "
            "separate model, which starts as a copy of the initial policy."
        ),
    ] = "policy"
    learning_rate: Annotated[float, Field(gt=0, description="Learning rate of the critic's own AdamW.")] = 1e-5
    gamma: Annotated[float, Field(gt=0, le=1, description="Discount of rewards for each token.")] = 1.0
    lam: Annotated[
        float, Field(ge=0, le=1, description="GAE's lambda: 1 trusts the observed rewards, 0 the critic.")
    ] = 0.95
    cliprange_value: Annotated[
        float | None,
        Field(gt=0, description="A value that moved further than this in a step gets no gradient; none: no limit."),
    ] = 0.2


class PreferenceSettings(Section):
    """``[algorithm.preference]``: settings of ``dpo`` and ``ipo``."""

    beta: Annotated[float, Field(gt=0, description="Strength of the KL penalty that ties policy to reference.")] = 0.1


class SelectionSettings(Section):
    """``[algorithm.selection]``: which samples ``rft`` trains."""

    threshold: Annotated[
        float | None, Field(description="Train samples with at least this reward; none: the best one of each group.")
    ] = None


class TeacherSettings(Section):
    """``[algorithm.teacher]``: the model that ``distillation`` learns from."""

    path: Annotated[
        str, Field(description="The teacher: a local HF directory or a hub id, with the policy's vocabulary.")
    ] = ""


class AlgorithmSettings(Section):
    """``[algorithm]``: names follow TRL where it has one."""

    name: Annotated[
        str,
        Field(
            description="grpo, dr_grpo, dapo, gspo, cispo, dppo, rloo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, ppo, dpo, ipo, rft, distillation, or your own as package.module:Class. Each "
            "one's defaults are in docs/algorithms.md. The name is also the key of step reports."
        ),
    ] = "grpo"
    policy_loss: Annotated[
        Literal["clip", "gspo", "cispo", "dppo", "reinforce"],
        Field(
            description="A token's loss: clipped ratio (clip), clipped ratio of the whole sequence (gspo), log-prob "
            "with a clipped weight (cispo), ratio masked by the change of probability (dppo), weighted log-prob "
            "(reinforce)."
        ),
    ] = "clip"
    loss_type: Annotated[
        Literal["grpo", "dapo", "dr_grpo"],
        Field(
            description="How token losses are averaged: in each sequence and then over sequences (grpo), over all "
            "trained tokens of the batch (dapo), or over sequences x max_completion_length (dr_grpo)."
        ),
    ] = "dapo"
    ratio: Annotated[
        Literal["behaviour", "proximal"],
        Field(
            description="Which ratio is clipped. behaviour: policy / behaviour policy. proximal: policy / policy at "
            "the step's start, with a weight for the behaviour policy (decoupled PPO; with one update a batch it never "
            "clips)."
        ),
    ] = "behaviour"
    num_iterations: Annotated[int, Field(ge=1, description="Passes over a batch, each with its own updates.")] = 1
    num_mini_batches: Annotated[
        int, Field(ge=1, description="Updates in one pass, each on whole groups; 1: the batch is one update.")
    ] = 1
    epsilon: Annotated[
        float,
        Field(
            ge=0, le=1, description="Lower clip: the ratio's floor is 1 - epsilon; dppo: most that a probability falls."
        ),
    ] = 0.2
    epsilon_high: Annotated[
        float | None,
        Field(
            gt=0,
            description="Upper clip: the ratio's ceiling is 1 + this; none: epsilon; dppo: most that a probability "
            "rises.",
        ),
    ] = 0.28
    importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"],
        Field(
            description="How importance weights outside importance_sampling_floor and _cap are treated: limited "
            "(truncate) or set to 0 (mask), for each token or for the product over a sequence; none: no weights."
        ),
    ] = "token_truncate"
    importance_sampling_cap: Annotated[
        float | None,
        Field(ge=1, description="Upper limit of importance weights; none: no limit."),
    ] = 2.0
    importance_sampling_floor: Annotated[
        float, Field(ge=0, le=1, description="Lower limit of importance weights; with token_mask this is IcePop.")
    ] = 0.0
    beta: Annotated[
        float, Field(ge=0, description="Weight of the KL to the initial model; with 0 no reference is loaded for it.")
    ] = 0.0
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Field(description="With d = log reference - log policy: -d, d squared / 2, or exp(d) - d - 1."),
    ] = "k3"
    kl_in_reward: Annotated[
        bool,
        Field(
            description="With ppo or reinforce_plus_plus: subtract beta's KL (k1) from each token's reward instead of "
            "adding it to the loss."
        ),
    ] = False
    use_bias_correction_kl: Annotated[
        bool,
        Field(
            description="Weight the KL term by policy / behaviour policy, truncated like the loss. Then its gradient "
            "is right also for tokens that another policy sampled; off: the plain estimator."
        ),
    ] = True
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Field(
            description="Divide centred rewards by the standard deviation of the group (rloo then divides by none), of "
            "the batch, or by none."
        ),
    ] = "group"
    dynamic_sampling: Annotated[
        bool, Field(description="Skip groups whose rewards are all equal, and wait for another group instead.")
    ] = False
    mask_truncated_completions: Annotated[
        bool,
        Field(description="Leave completions that hit the length limit out of the gradient, but not of the baseline."),
    ] = False
    overlong_l_max: Annotated[
        int | None,
        Field(ge=1, description="Length in tokens from which the overlong penalty is 1; none: no penalty."),
    ] = None
    overlong_l_cache: Annotated[
        int, Field(ge=1, description="Tokens before overlong_l_max over which the penalty grows from 0.")
    ] = 64
    options: Annotated[
        dict[str, JsonValue], Field(description="Settings of your own algorithm, which its class checks.")
    ] = {}
    critic: CriticSettings = CriticSettings()
    preference: PreferenceSettings = PreferenceSettings()
    selection: SelectionSettings = SelectionSettings()
    teacher: TeacherSettings = TeacherSettings()

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        """Add the preset of the algorithm's name, which the given values override."""
        if not isinstance(values, dict) or not isinstance(name := values.get("name", "grpo"), str):
            return values
        return PRESETS.get(name, {}) | values

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PRESETS and not is_import_path(name):
            nearest = difflib.get_close_matches(ALIASES.get(name.lower(), name.lower()), PRESETS, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(PRESETS)}"
            raise ValueError(f"expected a built-in algorithm or package.module:Class, got {name!r}{hint}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for contradiction in self._contradictions():
            raise ValueError(contradiction)
        return self

    def _contradictions(self) -> Iterator[str]:
        own = is_import_path(self.name)
        if self.scale_rewards == "batch" and (self.beta > 0 or self.log_ratio_penalty > 0):
            yield (
                'algorithm.scale_rewards="batch" needs algorithm.beta=0 and another policy_loss than dppo: the '
                "batch's deviation is known only after the gradient, and would scale their penalties too; "
                f'got beta={self.beta}, policy_loss="{self.policy_loss}"'
            )
        is_centred = own or self.name in CENTRED
        if self.scale_rewards == "batch" and not is_centred:
            yield (
                'algorithm.scale_rewards="batch" divides centred rewards, and expects one of '
                f"{', '.join(sorted(CENTRED))}, got {self.name}"
            )
        if self.overlong_l_max is not None and self.overlong_l_cache >= self.overlong_l_max:
            yield (
                f"expected algorithm.overlong_l_cache below overlong_l_max={self.overlong_l_max}, "
                f"got {self.overlong_l_cache}"
            )
        has_weight = self.ratio == "proximal" or self.policy_loss == "reinforce"
        if self.importance_sampling_mode == "sequence_truncate" and not has_weight:
            yield (
                'importance_sampling_mode="sequence_truncate" limits a weight next to the ratio, and expects '
                f'algorithm.ratio="proximal" or policy_loss="reinforce", got "{self.ratio}" and "{self.policy_loss}"'
            )
        if self.kl_estimator == "k1" and self.beta > 0 and not self.use_bias_correction_kl and not self.kl_in_reward:
            yield (
                'algorithm.kl_estimator="k1" expects use_bias_correction_kl=true or kl_in_reward=true: the plain '
                "estimator's gradient is 0 in expectation"
            )
        if self.kl_in_reward and not (own or (self.name in BY_RETURNS and self.beta > 0)):
            yield (
                f"expected algorithm.kl_in_reward with {' or '.join(sorted(BY_RETURNS))} and algorithm.beta above 0, "
                f"got {self.name} and beta={self.beta}"
            )
        if self.name in PAIRWISE and self.beta > 0:
            yield (
                f"expected algorithm.preference.beta for {self.name}, got algorithm.beta={self.beta}; set "
                "algorithm.preference.beta instead"
            )
        if self.name == "distillation" and not self.teacher.path:
            yield "expected a model in algorithm.teacher.path for distillation, got none"

    def changed(self) -> dict[str, Any]:
        """The values that differ from this name's defaults; with another name, that one's defaults fill the rest."""
        usual = type(self).model_construct(**PRESETS.get(self.name, {})).model_dump(exclude={"name"})
        return {name: value for name, value in self.model_dump(exclude={"name"}).items() if value != usual[name]}

    @property
    def clip_range(self) -> tuple[float, float]:
        """Floor and ceiling of the clipped ratio."""
        return 1 - self.epsilon, 1 + self.upper_epsilon

    @property
    def log_ratio_penalty(self) -> float:
        """Weight of log(policy / behaviour policy) squared, added to each token's loss."""
        return LOG_RATIO_PENALTY if self.policy_loss == "dppo" else 0.0

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages of all trained tokens of the batch are scaled to mean 0 and deviation 1."""
        return self.name in WHITENED

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or ``epsilon`` if it is unset."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return self.num_iterations * self.num_mini_batches

    @property
    def has_own_kl_term(self) -> bool:
        """Whether the KL to the reference is added to the loss."""
        return self.beta > 0 and not self.kl_in_reward
