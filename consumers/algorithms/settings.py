"""``[algorithm]``: which algorithm of the shelf, and what may be varied in it. Knows no tensors and no other module.

Each name has its own defaults (``PRESETS``): what the paper or its peers say, where that differs from the field's own
default. A user's own algorithm, named by import path, has those of the fields, and reads ``[algorithm.options]``.
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
        "log_ratio_penalty": 1e-3,
    },
    "rloo": {},
    "reinforce_plus_plus": {"scale_rewards": "none", "whiten_advantages": True, "epsilon_high": 0.2},
    "reinforce_plus_plus_baseline": {"scale_rewards": "none", "whiten_advantages": True, "epsilon_high": 0.2},
    "ppo": {"scale_rewards": "none", "whiten_advantages": True, "epsilon_high": 0.2},
    "dpo": {"scale_rewards": "none", "importance_sampling_mode": "none"},
    "ipo": {"scale_rewards": "none", "importance_sampling_mode": "none"},
    "rft": {"policy_loss": "reinforce", "scale_rewards": "none", "importance_sampling_mode": "none"},
    "distillation": {"policy_loss": "reinforce", "scale_rewards": "none"},
}
"""By name: the defaults that differ from those of the fields."""

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
"""What other libraries call them."""
PAIRWISE = frozenset({"dpo", "ipo"})
WITHOUT_A_GROUP = frozenset({"ppo", "reinforce_plus_plus", "rft", "distillation"})
"""Those that teach something by a group of one, too."""
CENTRED = frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "rloo"})
"""Those whose advantages are rewards less a baseline of the group's."""
BY_RETURNS = frozenset({"ppo", "reinforce_plus_plus"})
"""Those whose rewards stand at tokens."""


def is_import_path(name: str) -> bool:
    """Whether an algorithm's name is a user's own, ``package.module:Class``."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def lone_refusal(name: str) -> str:
    """Why an algorithm learns nothing from a group of one, and what to do about it; empty: it may learn something."""
    if name in WITHOUT_A_GROUP or is_import_path(name):
        return ""
    return (
        f"{name} compares the completions of a prompt, so one has an advantage of 0; ask for n of 2 or more, or set "
        "algorithm.name to reinforce_plus_plus"
    )


class CriticSettings(Section):
    """``[algorithm.critic]``: the value model of ``ppo``. Names are TRL's where TRL has one."""

    trunk: Annotated[
        Literal["policy", "own"],
        Field(
            description="What the value head stands on: the policy's hidden states, which its gradient leaves alone, "
            "or a model of its own, begun as a copy of the initial policy."
        ),
    ] = "policy"
    learning_rate: Annotated[float, Field(gt=0, description="Of the critic's own AdamW.")] = 1e-5
    gamma: Annotated[float, Field(gt=0, le=1, description="Discount of rewards, a token.")] = 1.0
    lam: Annotated[
        float, Field(ge=0, le=1, description="GAE's lambda: 1 trusts the rewards that came, 0 the critic.")
    ] = 0.95
    cliprange_value: Annotated[
        float | None,
        Field(gt=0, description="How far a value may move from that at the step's start and still learn; none: any."),
    ] = 0.2
    max_grad_norm: Annotated[float, Field(gt=0, description="The critic's gradients are scaled down to this.")] = 1.0


class PreferenceSettings(Section):
    """``[algorithm.preference]``: ``dpo`` and ``ipo``."""

    beta: Annotated[float, Field(gt=0, description="How strongly the policy is held to the reference.")] = 0.1
    label_smoothing: Annotated[
        float, Field(ge=0, lt=0.5, description="dpo: probability that a pair is the wrong way round.")
    ] = 0.0
    length_average: Annotated[
        bool,
        Field(description="Log-probs averaged over a completion's tokens, as TRL's IPO does; off: summed, as defined."),
    ] = False


class SelectionSettings(Section):
    """``[algorithm.selection]``: which samples ``rft`` trains."""

    threshold: Annotated[
        float | None, Field(description="Samples with at least this reward; none: the best keep_best of each group.")
    ] = None
    keep_best: Annotated[int, Field(ge=1, description="So many of a group, if there is no threshold.")] = 1


class TeacherSettings(Section):
    """``[algorithm.teacher]``: whom ``distillation`` learns from."""

    path: Annotated[
        str, Field(description="The teacher: a local HF directory or a hub id, with the policy's vocabulary.")
    ] = ""
    kl_coef: Annotated[float, Field(gt=0, description="Weight of the reverse KL to the teacher, a token.")] = 1.0


class AlgorithmSettings(Section):
    """``[algorithm]``: the names are TRL's where TRL has one."""

    name: Annotated[
        str,
        Field(
            description="grpo, dr_grpo, dapo, gspo, cispo, dppo, rloo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, ppo, dpo, ipo, rft, distillation, or your own as package.module:Class. Its "
            "defaults are in docs/algorithms.md. Also the key of the step reports."
        ),
    ] = "grpo"
    policy_loss: Annotated[
        Literal["clip", "gspo", "cispo", "dppo", "reinforce"],
        Field(
            description="A token's loss: the clipped ratio (clip), that of whole sequences (gspo), the clipped weight "
            "of a log-prob (cispo), a mask by probabilities' difference (dppo), the weighted log-prob (reinforce)."
        ),
    ] = "clip"
    loss_type: Annotated[
        Literal["grpo", "dapo", "dr_grpo"],
        Field(
            description="How token losses are averaged: per sequence and then over sequences (grpo), over all trained "
            "tokens of the batch (dapo), or over sequences x max_completion_length (dr_grpo)."
        ),
    ] = "dapo"
    ratio: Annotated[
        Literal["behaviour", "proximal"],
        Field(
            description="Which ratio is clipped: policy / behaviour policy, or policy / policy at the start of the "
            "step, times the weight of the behaviour policy (decoupled PPO; never clips at one update per batch)."
        ),
    ] = "behaviour"
    num_iterations: Annotated[int, Field(ge=1, description="Passes over a batch, each with its own updates.")] = 1
    num_mini_batches: Annotated[
        int, Field(ge=1, description="Updates of one pass, each of whole groups; 1: the batch is one update.")
    ] = 1
    epsilon: Annotated[
        float, Field(ge=0, le=1, description="Lower clip: the ratio's floor is 1 - epsilon; dppo: of probabilities.")
    ] = 0.2
    epsilon_high: Annotated[
        float | None,
        Field(gt=0, description="Upper clip: the ratio's ceiling is 1 + this; none: epsilon; dppo: of probabilities."),
    ] = 0.28
    importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"],
        Field(
            description="What happens to importance weights outside importance_sampling_floor and _cap: limited or 0, "
            "each token's or the product of a sequence's; none: there are no weights."
        ),
    ] = "token_truncate"
    importance_sampling_cap: Annotated[
        float | None,
        Field(ge=1, description="Largest importance weight that counts; none: no limit."),
    ] = 2.0
    importance_sampling_floor: Annotated[
        float, Field(ge=0, le=1, description="Smallest importance weight that counts; with token_mask: IcePop.")
    ] = 0.0
    log_ratio_penalty: Annotated[
        float, Field(ge=0, description="Weight of log(policy / behaviour policy) squared, added to each token's loss.")
    ] = 0.0
    beta: Annotated[
        float, Field(ge=0, description="Weight of the KL to the initial model; 0 loads no reference for it.")
    ] = 0.0
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Field(description="With d = log reference - log policy: -d, d squared / 2, or exp(d) - d - 1."),
    ] = "k3"
    kl_in_reward: Annotated[
        bool, Field(description="ppo, reinforce_plus_plus: beta's KL (k1) is taken off each token's reward, not added.")
    ] = False
    use_bias_correction_kl: Annotated[
        bool,
        Field(
            description="Weigh the KL term by policy / behaviour policy, truncated as the loss is: its gradient is the "
            "KL's, whatever policy sampled the tokens; off: the plain estimator."
        ),
    ] = True
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Field(
            description="Standard deviation that centred rewards are divided by: of the group (not rloo, which then "
            "divides by none), of the batch, none."
        ),
    ] = "group"
    whiten_advantages: Annotated[
        bool,
        Field(description="Advantages of all trained tokens of the batch to mean 0 and deviation 1."),
    ] = False
    dynamic_sampling: Annotated[
        bool, Field(description="Skip groups whose rewards are all equal, and wait for another group instead.")
    ] = False
    mask_truncated_completions: Annotated[
        bool, Field(description="Leave completions that hit the length limit out of the gradient, not of the baseline.")
    ] = False
    overlong_l_max: Annotated[
        int | None,
        Field(ge=1, description="Length in tokens at which the overlong penalty is whole; none: no penalty."),
    ] = None
    overlong_l_cache: Annotated[
        int, Field(ge=1, description="Tokens before overlong_l_max over which the penalty grows from nothing.")
    ] = 64
    overlong_factor: Annotated[float, Field(ge=0, description="The whole overlong penalty, in units of reward.")] = 1.0
    options: Annotated[
        dict[str, JsonValue], Field(description="Settings of an algorithm of your own, which its class checks.")
    ] = {}
    critic: CriticSettings = CriticSettings()
    preference: PreferenceSettings = PreferenceSettings()
    selection: SelectionSettings = SelectionSettings()
    teacher: TeacherSettings = TeacherSettings()

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        """What a name stands for, below what is given."""
        if not isinstance(values, dict) or not isinstance(name := values.get("name", "grpo"), str):
            return values
        return PRESETS.get(name, {}) | values

    @field_validator("name")
    @classmethod
    def _on_the_shelf(cls, name: str) -> str:
        if name not in PRESETS and not is_import_path(name):
            nearest = difflib.get_close_matches(ALIASES.get(name.lower(), name.lower()), PRESETS, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(PRESETS)}"
            raise ValueError(f"expected an algorithm of the shelf or package.module:Class, got {name!r}{hint}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for refused in self._contradictions():
            raise ValueError(refused)
        return self

    def _contradictions(self) -> Iterator[str]:
        own = is_import_path(self.name)
        if self.scale_rewards == "batch" and (self.beta > 0 or self.log_ratio_penalty > 0):
            yield (
                'algorithm.scale_rewards="batch" needs algorithm.beta=0: the batch\'s deviation is known only after '
                "the gradient, and would scale the KL term too, and algorithm.log_ratio_penalty=0 likewise; "
                f"got beta={self.beta}, log_ratio_penalty={self.log_ratio_penalty}"
            )
        is_centred = (own or self.name in CENTRED) and not self.whiten_advantages
        if self.scale_rewards == "batch" and not is_centred:
            yield (
                'algorithm.scale_rewards="batch" divides centred rewards, and expects one of '
                f"{', '.join(sorted(CENTRED))} without whiten_advantages, got {self.name}"
            )
        if self.overlong_l_max is not None and self.overlong_l_cache >= self.overlong_l_max:
            yield (
                f"expected algorithm.overlong_l_cache below overlong_l_max={self.overlong_l_max}, "
                f"got {self.overlong_l_cache}"
            )
        has_weight = self.ratio == "proximal" or self.policy_loss == "reinforce"
        if self.importance_sampling_mode == "sequence_truncate" and not has_weight:
            yield (
                'importance_sampling_mode="sequence_truncate" limits a weight beside the ratio, and expects '
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
            yield f"expected algorithm.preference.beta for {self.name}, got algorithm.beta={self.beta}; set the former"
        if self.name == "distillation" and not self.teacher.path:
            yield "expected a model in algorithm.teacher.path for distillation, got none"

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults of this name; with another name, that one's defaults take the other places."""
        usual = type(self).model_construct(**PRESETS.get(self.name, {})).model_dump(exclude={"name"})
        return {name: value for name, value in self.model_dump(exclude={"name"}).items() if value != usual[name]}

    @property
    def clip_range(self) -> tuple[float, float]:
        """Floor and ceiling of the clipped ratio."""
        return 1 - self.epsilon, 1 + self.upper_epsilon

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or ``epsilon`` where there is none."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return self.num_iterations * self.num_mini_batches

    @property
    def has_own_kl_term(self) -> bool:
        """Whether the KL to the reference is added to the loss."""
        return self.beta > 0 and not self.kl_in_reward
