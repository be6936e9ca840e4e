"""The settings of the GRPO family and RLOO: which advantages, loss, and correction for off-policy samples."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.settings import Section


class AlgorithmSettings(Section):
    """``[algorithm]``: the names are TRL's where TRL has one."""

    name: Annotated[
        Literal["grpo", "rloo"],
        Field(
            description="Where advantages come from: rewards less their group's mean (grpo), or less the mean of the "
            "group's other rewards (rloo); either is 0 in a group of one. Also the key of the step reports."
        ),
    ] = "grpo"
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
            "step, times the truncated weight of the behaviour policy (never clips at one update per batch)."
        ),
    ] = "behaviour"
    epsilon: Annotated[float, Field(ge=0, lt=1, description="Lower clip: the ratio's floor is 1 - epsilon.")] = 0.2
    epsilon_high: Annotated[
        float | None, Field(gt=0, description="Upper clip: the ratio's ceiling is 1 + this; none: epsilon.")
    ] = 0.28
    importance_sampling_cap: Annotated[
        float | None,
        Field(ge=1, description="Largest policy / behaviour ratio that counts; none: not truncated."),
    ] = 2.0
    beta: Annotated[
        float, Field(ge=0, description="Weight of the KL to the initial model (k3 estimator); 0 loads no reference.")
    ] = 0.0
    use_bias_correction_kl: Annotated[
        bool,
        Field(
            description="Weigh the KL term by policy / behaviour policy, truncated as the loss is: its gradient is the "
            "KL's, whatever policy sampled the tokens; off: the plain k3 estimator."
        ),
    ] = True
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        Field(
            description="Standard deviation that centred rewards are divided by: of the group (grpo only; rloo then "
            "divides by none), of the batch, none."
        ),
    ] = "group"
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scale_rewards == "batch" and self.beta > 0:
            raise ValueError(
                'algorithm.scale_rewards="batch" needs algorithm.beta=0: the batch\'s deviation is known only after '
                f"the gradient, and would scale the KL term too; got beta={self.beta}"
            )
        if self.overlong_l_max is not None and self.overlong_l_cache >= self.overlong_l_max:
            raise ValueError(
                f"expected algorithm.overlong_l_cache below overlong_l_max={self.overlong_l_max}, "
                f"got {self.overlong_l_cache}"
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Floor and ceiling of the clipped ratio."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, 1 + high
