"""What the dispatcher asks for a length, and which predictor the settings mean."""

from typing import Protocol

from producers.lengths.completion import Completion
from producers.lengths.constant import ConstantLength
from producers.lengths.emulated.trace import SampleLength, TraceLengths
from producers.lengths.learning import LearnedLengths
from producers.lengths.measures.buckets import Buckets
from producers.lengths.observed import ObservedQuantiles
from producers.lengths.settings import LengthSettings
from schemas.errors import SettingsError
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings


class LengthPredictor(Protocol):
    """Estimates output lengths and learns from finished completions. Never raises; never needed for correctness."""

    @property
    def buckets(self) -> Buckets:
        """What the bucket of an estimate is found with."""
        ...

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """Estimate of the output length of one completion, in tokens. Only a trace asks which group it is for."""
        ...

    def observe(self, completion: Completion) -> None:
        """Learn the output length (tokens) that a prompt led to."""
        ...


def build_predictor(
    settings: LengthSettings, loop: LoopSettings, length_of: SampleLength | None = None
) -> LengthPredictor:
    """The predictor that the settings name. ``length_of``: the lengths of an emulated run, known in advance.

    Raises:
        SettingsError: lengths of a run are asked for that is not emulated.
    """
    buckets = build_buckets(settings, loop)
    match settings.predictor:
        case "constant":
            return ConstantLength(settings, loop, buckets)
        case "learned" | "language_model":
            return LearnedLengths(settings, loop, buckets)
        case "observed_quantiles":
            return ObservedQuantiles(settings, loop, buckets)
        case "trace":
            if length_of is None:
                raise SettingsError(
                    "expected generation.engine = 'emulated' with lengths.predictor = 'trace', got another"
                )
            return TraceLengths(loop, buckets, length_of, settings.trace_noise)


def build_buckets(settings: LengthSettings, loop: LoopSettings) -> Buckets:
    """The boundaries of the settings, or ones that are fitted to what is observed."""
    if settings.buckets == "fixed":
        return Buckets(loop.bucket_boundaries)
    return Buckets(
        loop.bucket_boundaries,
        fit_every=settings.refit_every,
        fit_after=settings.learn_after,
        folder=settings.model_dir,
    )
