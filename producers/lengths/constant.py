"""Predicts the same length for every prompt: the baseline that a real predictor has to beat."""

from producers.lengths.completion import Completion
from producers.lengths.settings import LengthSettings
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings


def prior(settings: LengthSettings, loop: LoopSettings, name: str) -> LengthEstimate:
    """The estimate before anything is seen: a fixed share of the completion limit."""
    length = max(1, round(settings.prior_fraction * loop.max_completion_length))
    return LengthEstimate(median=length, upper=length, bucket=loop.bucket_of(length), predictor=name)


class ConstantLength:
    """Learns nothing."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings) -> None:
        self._estimate = prior(settings, loop, "constant")

    def predict(self, prompt: Prompt) -> LengthEstimate:
        """The prior, whatever the prompt is."""
        return self._estimate

    def observe(self, completion: Completion) -> None:
        """Ignored."""
