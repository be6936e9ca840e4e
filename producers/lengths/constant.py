"""Predicts the same length for every prompt: the baseline that a real predictor has to beat."""

from producers.lengths.completion import Completion
from producers.lengths.measures.buckets import Buckets
from producers.lengths.settings import LengthSettings
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings


def prior(settings: LengthSettings, loop: LoopSettings, buckets: Buckets, name: str) -> LengthEstimate:
    """The estimate before anything is seen: a fixed share of the completion limit."""
    length = max(1, round(settings.prior_fraction * loop.max_completion_length))
    return LengthEstimate(
        median=length,
        upper=length,
        bucket=buckets.of(length),
        predictor=name,
        boundaries_version=buckets.version,
    )


class ConstantLength:
    """Learns nothing, but for the boundaries of the buckets."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings, buckets: Buckets | None = None) -> None:
        self._settings = settings
        self._loop = loop
        self.buckets = buckets or Buckets(loop.bucket_boundaries)

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The prior, whatever the prompt is."""
        return prior(self._settings, self._loop, self.buckets, "constant")

    def observe(self, completion: Completion) -> None:
        """Only the buckets see it."""
        self.buckets.observe(completion.length)
