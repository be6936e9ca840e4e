"""What the dispatcher asks for a length, and which predictor the settings mean."""

from typing import Protocol

from producers.lengths.completion import Completion
from producers.lengths.constant import ConstantLength
from producers.lengths.learning import LearnedLengths
from producers.lengths.observed import ObservedQuantiles
from producers.lengths.settings import LengthSettings
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings


class LengthPredictor(Protocol):
    """Estimates output lengths and learns from finished completions. Never raises; never needed for correctness."""

    def predict(self, prompt: Prompt) -> LengthEstimate:
        """Estimate of the output length of one completion, in tokens."""
        ...

    def observe(self, completion: Completion) -> None:
        """Learn the output length (tokens) that a prompt led to."""
        ...


def build_predictor(settings: LengthSettings, loop: LoopSettings) -> LengthPredictor:
    """The predictor that the settings name."""
    match settings.predictor:
        case "constant":
            return ConstantLength(settings, loop)
        case "learned":
            return LearnedLengths(settings, loop)
        case "observed_quantiles":
            return ObservedQuantiles(settings, loop)
