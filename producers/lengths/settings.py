"""``[lengths]``: how output lengths are predicted."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.settings import Section


class LengthSettings(Section):
    """``[lengths]``."""

    predictor: Annotated[
        Literal["observed_quantiles", "constant"],
        Field(description="Quantiles of what was seen, or always the prior (the baseline)."),
    ] = "observed_quantiles"
    quantile: Annotated[
        float, Field(ge=0.5, lt=1.0, description="Share of completions that should end below the upper estimate.")
    ] = 0.9
    min_observations: Annotated[
        int, Field(ge=1, description="Completions seen before a prompt class is trusted over a wider one.")
    ] = 32
    window: Annotated[int, Field(ge=1, description="Most recent completions kept for each prompt class.")] = 512
    prior_fraction: Annotated[
        float, Field(gt=0, le=1, description="Estimate before anything is seen, as a share of max_completion_length.")
    ] = 0.5

    @model_validator(mode="after")
    def _window_suffices(self) -> Self:
        if self.window < self.min_observations:
            raise ValueError(
                f"expected lengths.window >= min_observations ({self.min_observations}), got {self.window}"
            )
        return self
