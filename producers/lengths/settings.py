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
    buckets: Annotated[
        Literal["fixed", "fitted"],
        Field(
            description="Boundaries of the length buckets. fixed: loop.bucket_boundaries; fitted: the same number of "
            "boundaries, fitted to observed lengths so that all buckets hold equally many tokens."
        ),
    ] = "fixed"
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

    @model_validator(mode="after")
    def _models_have_a_place(self) -> Self:
        if self.model_dir is None and (self.predictor == "language_model" or self.refit == "process"):
            raise ValueError(
                f"expected lengths.model_dir with lengths.predictor {self.predictor} and refit {self.refit}, got none"
            )
        if self.refit == "process" and self.predictor not in ("learned", "language_model"):
            raise ValueError(
                f"expected lengths.predictor learned or language_model with lengths.refit process, got {self.predictor}"
            )
        return self

    @property
    def fits_in_thread(self) -> bool:
        """Whether the predictor fits its own model."""
        return self.predictor == "learned" and self.refit == "thread"
