"""Knows the lengths of an emulated run in advance, or knows them as badly as told: what a ranker's quality is worth.

It does not know the emulation: whoever builds it hands over the function that gives a sample's length. The noise of a
prompt is a function of its id, so that every process and every repeat sees the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, median_low
from typing import Protocol

import structlog
import xxhash

from producers.lengths.buckets import Buckets, RecentLengths
from producers.lengths.settings import LengthSettings
from schemas.errors import DataError
from schemas.identifiers import make_group_id
from schemas.settings import LoopSettings
from schemas.trajectories import FinishReason, LengthEstimate, Prompt, Trajectory

# What a predictor learns from: one finished completion, with the prompt that led to it.


@dataclass(frozen=True, slots=True)
class Completion:
    """``length`` in tokens; ``version``: number of the newest weights that sampled it.

    ``censored``: the limit cut it off, so that its own length would have been this or more.
    """

    prompt: Prompt
    group_id: str
    length: int
    version: int = 0
    censored: bool = False

    @classmethod
    def of(cls, trajectory: Trajectory, prompt: Prompt | None = None) -> "Completion":
        """From the topic's record; without the prompt that was ordered, from the record's text of it."""
        if prompt is None:
            prompt = Prompt(prompt_id=trajectory.prompt_id, dataset=trajectory.dataset, content=trajectory.prompt_text)
        return cls(
            prompt=prompt,
            group_id=trajectory.group_id,
            length=len(trajectory.token_ids),
            version=trajectory.newest_version.number,
            censored=trajectory.finish_reason is FinishReason.LENGTH,
        )


log = structlog.get_logger()

SampleLength = Callable[[str, int, Prompt], int]
"""Tokens of a sample's completion by group id, sample index and prompt; raises ``DataError`` if there is none."""
_BITS = 52
_P90 = NormalDist().inv_cdf(0.9)


class Finished(Protocol):
    """A completion that has ended; ``length`` in tokens."""

    @property
    def length(self) -> int:
        """Tokens of it."""
        ...


class TraceLengths:
    """Median and longest of a group's own lengths, each times exp(sigma × z) with z standard normal by prompt.

    The upper estimate leaves as much room as a calibrated predictor's would: 90 % of what may come lies below it.
    """

    def __init__(self, loop: LoopSettings, buckets: Buckets, length_of: SampleLength, sigma: float = 0.0) -> None:
        self.buckets = buckets
        self._loop = loop
        self._length_of = length_of
        self._sigma = sigma
        self._warned = False

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """What the trace says of the group; without its id, of the prompt's group in the first pass over the data."""
        group_id = group_id or make_group_id(prompt.prompt_id, 0)
        try:
            lengths = [self._length_of(group_id, index, prompt) for index in range(self._loop.num_generations)]
        except DataError as error:
            if not self._warned:
                log.warning("no length in the trace", prompt=prompt.prompt_id, error=str(error))
            self._warned = True
            return self._estimate(self._loop.max_completion_length / 2, self._loop.max_completion_length, "trace/none")
        factor = math.exp(self._sigma * _score(prompt.prompt_id)) if self._sigma else 1.0
        margin = math.exp(self._sigma * _P90)
        return self._estimate(factor * median_low(lengths), margin * factor * max(lengths), "trace")

    def observe(self, completion: Finished) -> None:
        """Only the buckets see it; lengths are known already."""
        self.buckets.observe(completion.length)

    def _estimate(self, median: float, longest: float, name: str) -> LengthEstimate:
        limit = self._loop.max_completion_length
        upper = max(1, min(limit, round(longest)))
        return LengthEstimate(
            median=max(1, min(limit, round(median))),
            upper=upper,
            bucket=self.buckets.of(upper),
            predictor=name,
            boundaries_version=self.buckets.version,
        )


def _score(name: str) -> float:
    """Standard normal, by a hash."""
    bits = xxhash.xxh3_64_intdigest(f"trace-noise/{name}".encode()) >> (64 - _BITS)
    return NormalDist().inv_cdf((bits + 0.5) / (1 << _BITS))


# Predicts the same length for every prompt: the baseline that a real predictor has to beat.


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


# Predicts output length from the quantiles of recent completions of similar prompts. Similar: the same data set and a
# prompt length (characters) within about 1.5 %; while too few of those are known, the same data set; then all
# prompts; then the prior. The bucket is that of the upper quantile, because a group is complete only when its longest
# sample is. Short completions end first, so the very first quantiles are too low.

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
