"""``[lengths]``: how output lengths are predicted."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from streamrl.schemas.settings import Section


class LengthSettings(Section):
    """``[lengths]``."""

    predictor: Annotated[
        Literal["observed_quantiles", "learned", "constant", "trace", "language_model"],
        Field(
            description="Quantiles of what was seen; trees or a language model fitted to it; always the prior (the "
            "baseline); or what an emulated run will be (for studies)."
        ),
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
    trace_noise: Annotated[
        float, Field(ge=0, description="trace: sigma of the log-normal noise that its lengths are multiplied by.")
    ] = 0.0
    buckets: Annotated[
        Literal["fixed", "fitted"],
        Field(
            description="Boundaries of the length buckets as loop.bucket_boundaries says, or as many, fitted to what "
            "is observed so that all buckets hold alike many tokens."
        ),
    ] = "fixed"

    min_samples: Annotated[int, Field(ge=64, description="Completions seen before the learned model is fitted.")] = 256
    refit_every: Annotated[
        int, Field(ge=64, description="Completions between two fits; fewer as long as few were seen.")
    ] = 4096
    reservoir_size: Annotated[
        int,
        Field(ge=64, le=262_144, description="Completions that a fit can draw on; older ones fade out. 1.2 KB each."),
    ] = 8192
    model_dir: Annotated[
        Path | None, Field(description="Where each fitted model is kept, to start from the newest; none keeps none.")
    ] = None
    refit: Annotated[
        Literal["thread", "process", "off"],
        Field(
            description="Who fits again during a run: a thread of the dispatcher (learned only), a ranker process that "
            "writes to model_dir, or nobody."
        ),
    ] = "thread"
    base_model: Annotated[
        Path | None,
        Field(description="language_model: what the ranker starts from if model_dir has none; a model's directory."),
    ] = None
    refit_seconds: Annotated[
        float, Field(gt=0, description="language_model: how long the ranker fine-tunes for one version.")
    ] = 20.0

    @model_validator(mode="after")
    def _window_suffices(self) -> Self:
        if self.window < self.min_observations:
            raise ValueError(
                f"expected lengths.window >= min_observations ({self.min_observations}), got {self.window}"
            )
        if self.model_dir is None and (self.predictor == "language_model" or self.refit == "process"):
            raise ValueError(f"expected lengths.model_dir, got none, for {self.predictor} with refit {self.refit}")
        if self.refit == "process" and self.predictor not in ("learned", "language_model"):
            raise ValueError(f"expected lengths.predictor learned or language_model to refit, got {self.predictor}")
        if self.reservoir_size < self.min_samples:
            raise ValueError(
                f"expected lengths.reservoir_size >= min_samples ({self.min_samples}), got {self.reservoir_size}"
            )
        return self

    @property
    def fits_in_thread(self) -> bool:
        """Whether the predictor fits its own model."""
        return self.predictor == "learned" and self.refit == "thread"
