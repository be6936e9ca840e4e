"""Predicts output length from the quantiles of recent completions of similar prompts.

Similar: the same data set and a prompt length (characters) within about 1.5 %; while too few of those are
known, the same data set; then all prompts; then the prior. The bucket is that of the upper quantile, because a group
is complete only when its longest sample is. Short completions end first, so the very first quantiles are too low.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

from producers.lengths.completion import Completion
from producers.lengths.constant import prior
from producers.lengths.settings import LengthSettings
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings

_Class = tuple[str | None, int | None]

FINEST_LENGTH = 48
"""Up to this many characters every prompt length is a class of its own."""
CLASSES_PER_DOUBLING = 48


class RecentLengths:
    """The last so many lengths, in order of arrival and of size."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        """Note a length; the oldest one leaves when the window is full."""
        if len(self._arrived) == self._window:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the lengths does not exceed (nearest rank)."""
        return self._sorted[max(0, math.ceil(share * len(self._sorted)) - 1)]

    def rank(self, length: int) -> float:
        """Share of the lengths that are shorter, those alike counted half; 0 to 1, and 0.5 before any is noted."""
        if not self._sorted:
            return 0.5
        return (bisect_left(self._sorted, length) + bisect_right(self._sorted, length)) / 2 / len(self._sorted)


class ObservedQuantiles:
    """The first real predictor; it needs no training and follows the policy as it changes."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings) -> None:
        self._settings = settings
        self._loop = loop
        self._seen: dict[_Class, RecentLengths] = {}

    def predict(self, prompt: Prompt) -> LengthEstimate:
        """An estimate from the narrowest class of prompts that was seen often enough."""
        classes = _classes(prompt.dataset, len(prompt.text))
        for name, similar in zip(("prompt_length", "dataset", "all"), classes, strict=True):
            lengths = self._seen.get(similar)
            if lengths is not None and len(lengths) >= self._settings.min_observations:
                return self._estimate(lengths, f"observed_quantiles/{name}")
        return prior(self._settings, self._loop, "observed_quantiles/prior")

    def observe(self, completion: Completion) -> None:
        """Learn the output length (tokens) of a finished completion."""
        for similar in _classes(completion.prompt.dataset, len(completion.prompt.text)):
            self._seen.setdefault(similar, RecentLengths(self._settings.window)).add(completion.length)

    def _estimate(self, lengths: RecentLengths, name: str) -> LengthEstimate:
        limit = self._loop.max_completion_length
        median = min(limit, max(1, lengths.quantile(0.5)))
        upper = min(limit, max(1, lengths.quantile(self._settings.quantile)))
        return LengthEstimate(median=median, upper=upper, bucket=self._loop.bucket_of(upper), predictor=name)


def _classes(dataset: str, prompt_length: int) -> tuple[_Class, _Class, _Class]:
    return (dataset, _length_class(prompt_length)), (dataset, None), (None, None)


def _length_class(prompt_length: int) -> int:
    """Prompts within about 1.5 % of each other: a long instruction must not hide what a short variable part says."""
    if prompt_length <= FINEST_LENGTH:
        return prompt_length
    return FINEST_LENGTH + int(CLASSES_PER_DOUBLING * math.log2(prompt_length / FINEST_LENGTH))
