"""Estimates of a prompt's output length: the dispatcher's port, and the predictors that need no fitting.

An estimate has a median, by which prompts are ordered, and an upper quantile, by which the bucket is chosen: a group is
complete only when its longest sample is.

Invariant estimates_are_advice_only: a predictor never raises, and correctness never depends on an estimate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, median_low
from typing import Protocol

import structlog
import xxhash

from streamrl.producers.lengths.buckets import Buckets, RecentLengths
from streamrl.producers.lengths.calibration import UPPER_SHARE
from streamrl.schemas.errors import DataError
from streamrl.schemas.identifiers import make_group_id
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import FinishedCompletion, FinishReason, LengthEstimate, Prompt

log = structlog.get_logger()
MIN_OBSERVATIONS = 32
"""Completions after which a class of prompts is preferred to a wider one: from fewer, the upper quantile is a guess."""
RECENT = 512
"""Newest completions that count in a class of prompts, because the policy's lengths drift."""
PRIOR_SHARE = 0.5
"""The estimate before the first completions, as a share of the completion limit."""
FINEST_LENGTH = 48
"""Characters of a prompt up to which every length is its own class."""
CLASSES_PER_DOUBLING = 48
"""Classes for longer prompts, per doubling of the length: each is 2^(1/48) - 1 = 1.5 % wide."""
_Class = tuple[str | None, int | None]
SampleLength = Callable[[str, int, Prompt], int]
"""Tokens of a sample's completion by group id, sample index and prompt; raises ``DataError`` if there is none."""
_BITS = 52
"""Bits of a hash that are used: as many as a float64 between 0 and 1 can distinguish."""
_P90 = NormalDist().inv_cdf(UPPER_SHARE)
"""Standard deviations from the median to the upper estimate, the 90 % quantile."""


@dataclass(frozen=True, slots=True)
class ObservedCompletion:
    """A finished completion with its prompt, from which a predictor learns.

    ``length``: in tokens; ``version``: number of the newest weights that sampled it; ``censored``: the completion limit
    cut it off, so its natural length would be this or more.
    """

    prompt: Prompt
    group_id: str
    length: int
    version: int = 0
    censored: bool = False

    @classmethod
    def of(cls, trajectory: FinishedCompletion, prompt: Prompt | None = None) -> "ObservedCompletion":
        """The observation of a record, with the prompt of its order, or else with the record's text of the prompt."""
        # A record has the prompt as one text; only the order has its turns and columns.
        if prompt is None:
            prompt = Prompt(prompt_id=trajectory.prompt_id, dataset=trajectory.dataset, content=trajectory.prompt_text)
        return cls(
            prompt=prompt,
            group_id=trajectory.group_id,
            length=trajectory.sampled_tokens,
            version=trajectory.newest_version.number,
            censored=trajectory.finish_reason is FinishReason.LENGTH,
        )


class LengthPredictor(Protocol):
    """Estimates output lengths and learns from finished completions. Never raises; never needed for correctness."""

    @property
    def buckets(self) -> Buckets:
        """The buckets from which an estimate's bucket is chosen."""
        ...

    @property
    def learns_from_the_past(self) -> bool:
        """Whether it learns from the run's earlier completions when it starts."""
        ...

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """Estimate of the output length of one completion, in tokens. ``group_id``: the group to be sampled."""
        ...

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn the output length of a finished completion."""
        ...


class ObservedQuantiles:
    """Predicts quantiles of recent completions of similar prompts. It needs no training, and follows the policy.

    Similar prompts are of the same data set and have a length in characters within about 1.5 %. While fewer than
    ``min_observations`` of these are known, all prompts of the data set count; then all prompts; then the prior. Short
    completions end first, so the very first quantiles are too low. ``upper``: share of the completions that the upper
    estimate should cover.
    """

    learns_from_the_past = False

    def __init__(
        self,
        loop: LoopSettings,
        buckets: Buckets | None = None,
        min_observations: int = MIN_OBSERVATIONS,
        upper: float = UPPER_SHARE,
    ) -> None:
        self._loop = loop
        self._min_observations = min_observations
        self._upper = upper
        self.buckets = buckets or Buckets(loop.bucket_boundaries)
        self._seen: dict[_Class, RecentLengths] = {}

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """An estimate from the narrowest class of prompts with enough observations."""
        # From the narrowest class to the widest.
        classes = _classes(prompt.dataset, len(prompt.text))
        for name, similar in zip(("prompt_length", "dataset", "all"), classes, strict=True):
            lengths = self._seen.get(similar)
            if lengths is not None and len(lengths) >= self._min_observations:
                return self._estimate(lengths, f"observed_quantiles/{name}")
        return prior(self._loop, self.buckets, "observed_quantiles/prior")

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn the output length of a finished completion."""
        self.buckets.observe(completion.length)
        # A completion counts in each of its three classes.
        for similar in _classes(completion.prompt.dataset, len(completion.prompt.text)):
            self._seen.setdefault(similar, RecentLengths(RECENT)).observe(completion.length)

    def _estimate(self, lengths: RecentLengths, name: str) -> LengthEstimate:
        limit = self._loop.max_completion_length
        # Earlier completions may be longer than the present limit.
        median = min(limit, max(1, lengths.quantile(0.5)))
        upper = min(limit, max(1, lengths.quantile(self._upper)))
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
    """The class of a prompt length, about 1.5 % wide: narrow, so that a long fixed instruction hides little."""
    # Continuous at FINEST_LENGTH: class = 48 + 48 × log2(length / 48).
    if prompt_length <= FINEST_LENGTH:
        return prompt_length
    return FINEST_LENGTH + int(CLASSES_PER_DOUBLING * math.log2(prompt_length / FINEST_LENGTH))


def prior(loop: LoopSettings, buckets: Buckets, name: str) -> LengthEstimate:
    """The estimate before the first completion: a fixed share of the completion limit."""
    # The spread is not known either, so median and upper estimate are equal.
    length = max(1, round(PRIOR_SHARE * loop.max_completion_length))
    return LengthEstimate(
        median=length,
        upper=length,
        bucket=buckets.of(length),
        predictor=name,
        boundaries_version=buckets.version,
    )


class ConstantLength:
    """Predicts the prior for every prompt: the baseline for real predictors. Only the buckets learn."""

    learns_from_the_past = False

    def __init__(self, loop: LoopSettings, buckets: Buckets | None = None) -> None:
        self._loop = loop
        self.buckets = buckets or Buckets(loop.bucket_boundaries)

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The prior."""
        return prior(self._loop, self.buckets, "constant")

    def observe(self, completion: ObservedCompletion) -> None:
        """Let the buckets learn the length."""
        self.buckets.observe(completion.length)


class Finished(Protocol):
    """The part of a finished completion that ``TraceLengths`` reads."""

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        ...


class TraceLengths:
    """Predicts the lengths of an emulated run, which are known in advance, with optional noise.

    With it one can study how much a ranker of a given quality would gain. Let m and l be the median and the longest of
    the group's lengths, and z standard normal by a hash of the prompt's id, so that every process and repeat has the
    same noise:

        median = m × exp(sigma × z)        upper = l × exp(sigma × z) × exp(sigma × 1.28)

    The last factor is the margin of a calibrated predictor: the 90 % quantile of the noise.
    """

    learns_from_the_past = False

    def __init__(self, loop: LoopSettings, buckets: Buckets, length_of: SampleLength, sigma: float = 0.0) -> None:
        self.buckets = buckets
        self._loop = loop
        self._length_of = length_of
        self._sigma = sigma
        self._warned = False

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The trace's lengths of the group; without an id, of the prompt's group in the first pass over the data."""
        group_id = group_id or make_group_id(prompt.prompt_id, 0)
        try:
            lengths = [self._length_of(group_id, index, prompt) for index in range(self._loop.num_generations)]
        except DataError as error:
            # Warn once: a trace that lacks one prompt most likely lacks many.
            if not self._warned:
                log.warning("no length in the trace", prompt=prompt.prompt_id, error=str(error))
            self._warned = True
            return self._estimate(self._loop.max_completion_length / 2, self._loop.max_completion_length, "trace/none")
        # The same factor for median and longest: the noise is per prompt, not per sample.
        factor = math.exp(self._sigma * _score(prompt.prompt_id)) if self._sigma else 1.0
        # z is above -1.28 with probability 0.9. Then exp(sigma × (z + 1.28)) is at least 1, so upper covers l.
        margin = math.exp(self._sigma * _P90)
        return self._estimate(factor * median_low(lengths), margin * factor * max(lengths), "trace")

    def observe(self, completion: Finished) -> None:
        """Let the buckets learn the length."""
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
    """A standard normal number, by a hash of the name."""
    # + 0.5 keeps the argument off 0 and 1, where the inverse of the distribution is infinite.
    bits = xxhash.xxh3_64_intdigest(f"trace-noise/{name}".encode()) >> (64 - _BITS)
    return NormalDist().inv_cdf((bits + 0.5) / (1 << _BITS))
