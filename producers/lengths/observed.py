"""Predicts output length from the quantiles of recent completions of similar prompts.

Similar: the same data set and a prompt length (characters) within about 1.5 %; while too few of those are
known, the same data set; then all prompts; then the prior. The bucket is that of the upper quantile, because a group
is complete only when its longest sample is. Short completions end first, so the very first quantiles are too low.
"""

import math

from producers.lengths.completion import Completion
from producers.lengths.constant import prior
from producers.lengths.measures.buckets import Buckets
from producers.lengths.measures.recent import RecentLengths
from producers.lengths.settings import LengthSettings
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings

_Class = tuple[str | None, int | None]

FINEST_LENGTH = 48
"""Up to this many characters every prompt length is a class of its own."""
CLASSES_PER_DOUBLING = 48


class ObservedQuantiles:
    """The first real predictor; it needs no training and follows the policy as it changes."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings, buckets: Buckets | None = None) -> None:
        self._settings = settings
        self._loop = loop
        self.buckets = buckets or Buckets(loop.bucket_boundaries)
        self._seen: dict[_Class, RecentLengths] = {}

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """An estimate from the narrowest class of prompts that was seen often enough."""
        classes = _classes(prompt.dataset, len(prompt.text))
        for name, similar in zip(("prompt_length", "dataset", "all"), classes, strict=True):
            lengths = self._seen.get(similar)
            if lengths is not None and len(lengths) >= self._settings.min_observations:
                return self._estimate(lengths, f"observed_quantiles/{name}")
        return prior(self._settings, self._loop, self.buckets, "observed_quantiles/prior")

    def observe(self, completion: Completion) -> None:
        """Learn the output length (tokens) of a finished completion."""
        self.buckets.observe(completion.length)
        for similar in _classes(completion.prompt.dataset, len(completion.prompt.text)):
            self._seen.setdefault(similar, RecentLengths(self._settings.window)).add(completion.length)

    def _estimate(self, lengths: RecentLengths, name: str) -> LengthEstimate:
        limit = self._loop.max_completion_length
        median = min(limit, max(1, lengths.quantile(0.5)))
        upper = min(limit, max(1, lengths.quantile(self._settings.quantile)))
        return LengthEstimate(
            median=median,
            upper=upper,
            bucket=self.buckets.of(upper),
            predictor=name,
            boundaries_version=self.buckets.version,
        )


def _classes(dataset: str, prompt_length: int) -> tuple[_Class, _Class, _Class]:
    return (dataset, _length_class(prompt_length)), (dataset, None), (None, None)


def _length_class(prompt_length: int) -> int:
    """Prompts within about 1.5 % of each other: a long instruction must not hide what a short variable part says."""
    if prompt_length <= FINEST_LENGTH:
        return prompt_length
    return FINEST_LENGTH + int(CLASSES_PER_DOUBLING * math.log2(prompt_length / FINEST_LENGTH))
