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
            description="observed_quantiles: quantiles of earlier lengths; learned: trees fitted to them; "
            "language_model: a language model fitted to them; constant: always the prior (the baseline); trace: the "
            "known lengths of an emulated run (for studies)."
        ),
    ] = "observed_quantiles"
    quantile: Annotated[
        float, Field(ge=0.5, lt=1.0, description="Share of completions that should not exceed the upper estimate.")
    ] = 0.9
    min_observations: Annotated[
        int, Field(ge=1, description="Completions after which a class of prompts is preferred to a wider class.")
    ] = 32
    window: Annotated[int, Field(ge=1, description="Most recent completions kept for each prompt class.")] = 512
    prior_fraction: Annotated[
        float,
        Field(gt=0, le=1, description="Estimate before the first completions, as a share of max_completion_length."),
    ] = 0.5
    trace_noise: Annotated[
        float, Field(ge=0, description="trace: sigma of the log-normal noise by which the lengths are multiplied.")
    ] = 0.0
    buckets: Annotated[
        Literal["fixed", "fitted"],
        Field(
            description="Boundaries of the length buckets. fixed: loop.bucket_boundaries; fitted: the same number of "
            "boundaries, fitted to observed lengths so that all buckets hold equally many tokens."
        ),
    ] = "fixed"

    min_samples: Annotated[int, Field(ge=64, description="Completions before the learned model is first fitted.")] = 256
    refit_every: Annotated[
        int, Field(ge=64, description="Completions between two fits; fewer while few completions are known.")
    ] = 4096
    reservoir_size: Annotated[
        int,
        Field(
            ge=64, le=262_144, description="Completions kept for fits; older ones are replaced at random. 1.2 KB each."
        ),
    ] = 8192
    model_dir: Annotated[
        Path | None,
        Field(description="Directory in which fitted models are kept; a run starts from the newest. Unset: none."),
    ] = None
    refit: Annotated[
        Literal["thread", "process", "off"],
        Field(
            description="How models are refitted during a run. thread: in the dispatcher (learned only); process: in a "
            "ranker process that writes to model_dir; off: never."
        ),
    ] = "thread"
    base_model: Annotated[
        Path | None,
        Field(description="language_model: directory of the model from which the ranker starts if model_dir has none."),
    ] = None
    refit_seconds: Annotated[
        float, Field(gt=0, description="language_model: seconds for which the ranker fine-tunes each version.")
    ] = 20.0

    @model_validator(mode="after")
    def _window_suffices(self) -> Self:
        if self.window < self.min_observations:
            raise ValueError(
                f"expected lengths.window >= min_observations ({self.min_observations}), got {self.window}"
            )
        if self.model_dir is None and (self.predictor == "language_model" or self.refit == "process"):
            raise ValueError(
                f"expected lengths.model_dir with lengths.predictor {self.predictor} and refit {self.refit}, got none"
            )
        if self.refit == "process" and self.predictor not in ("learned", "language_model"):
            raise ValueError(
                f"expected lengths.predictor learned or language_model with lengths.refit process, got {self.predictor}"
            )
        if self.reservoir_size < self.min_samples:
            raise ValueError(
                f"expected lengths.reservoir_size >= min_samples ({self.min_samples}), got {self.reservoir_size}"
            )
        return self

    @property
    def fits_in_thread(self) -> bool:
        """Whether the predictor fits its own model."""
        return self.predictor == "learned" and self.refit == "thread"
