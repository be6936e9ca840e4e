"""``[lengths]``: how output lengths are predicted."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.settings import Section


class LengthSettings(Section):
    """``[lengths]``."""

    predictor: Annotated[
        Literal["observed_quantiles", "learned", "constant"],
        Field(description="Quantiles of what was seen, a model fitted to it, or always the prior (the baseline)."),
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

    learn_after: Annotated[int, Field(ge=64, description="Completions seen before the learned model is fitted.")] = 256
    refit_every: Annotated[
        int, Field(ge=64, description="Completions between two fits; fewer as long as few were seen.")
    ] = 4096
    memory: Annotated[
        int,
        Field(ge=64, le=262_144, description="Completions that a fit can draw on; older ones fade out. 1.2 KB each."),
    ] = 8192
    model_dir: Annotated[
        Path | None, Field(description="Where each fitted model is kept, to start from the newest; none keeps none.")
    ] = None

    @model_validator(mode="after")
    def _window_suffices(self) -> Self:
        if self.window < self.min_observations:
            raise ValueError(
                f"expected lengths.window >= min_observations ({self.min_observations}), got {self.window}"
            )
        if self.memory < self.learn_after:
            raise ValueError(f"expected lengths.memory >= learn_after ({self.learn_after}), got {self.memory}")
        return self
