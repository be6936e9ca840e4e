"""Knows the lengths of an emulated run in advance, or knows them as badly as told: what a ranker's quality is worth.

It does not know the emulation: whoever builds it hands over the function that gives a sample's length. The noise of a
prompt is a function of its id, so that every process and every repeat sees the same.
"""

import math
from collections.abc import Callable
from statistics import NormalDist, median_low
from typing import Protocol

import structlog
import xxhash

from producers.lengths.measures.buckets import Buckets
from schemas.errors import DataError
from schemas.identifiers import make_group_id
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings

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
