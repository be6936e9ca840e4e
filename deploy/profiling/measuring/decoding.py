"""Seconds of decode steps by batch size and context, of prefills, and of taking new weights, on a loaded decoder.

The decoder's model must not end completions by itself. Knows no curve.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from producers.generation.engines.decoder import Completion, Decoder
from producers.generation.engines.facts import ModelFacts
from schemas.errors import ModelError
from schemas.messages.prompts import SamplingParams
from schemas.ports.engine import GenerationRequest

SHORTEST_PROMPT = 8
ROUNDS_TO_START = 10_000
PREFILLS = 3
UNEVEN = 1 / 8


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode step of ``batch`` completions with ``context`` tokens in all their caches, in seconds."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """What the admission of ``prompts`` prompts of ``tokens`` tokens in all added to a decode step, in seconds."""

    prompts: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class DecodeMeter:
    """``steps``: timed decode steps per point, of which the median counts; ``clock``: in seconds."""

    decoder: Decoder[Any]
    facts: ModelFacts
    steps: int
    clock: Callable[[], float] = time.perf_counter

    def steps_at(self, batches: Sequence[int], contexts: Sequence[int]) -> Iterator[DecodePoint]:
        """Points for all batch sizes, with contexts up to each of these lengths.

        In a batch they are as different as a run's: the longest, and others down to an eighth of it. An engine that
        pads to the longest is measured as it will be used; for others only their sum counts.
        """
        self._fill([SHORTEST_PROMPT] * min(batches))
        self._timed()
        self.decoder.clear()
        for batch in batches:
            for context in contexts:
                running = self._fill(uneven(context, batch))
                before = _cached(running)
                seconds = self._timed()
                yield DecodePoint(batch, (before + _cached(running)) // 2, seconds)
                self.decoder.clear()

    def prefills_at(self, lengths: Sequence[int], counts: Sequence[int]) -> Iterator[PrefillPoint]:
        """Points for so many prompts of each length at once, on an otherwise empty decoder."""
        for length in lengths:
            for number in counts:
                seconds = min(self._prefill_s(number, length) for _ in range(PREFILLS))
                yield PrefillPoint(number, number * length, max(0.0, seconds))

    def _prefill_s(self, number: int, length: int) -> float:
        running = self._add([length] * number)
        began = self.clock()
        rounds = self._until_all_run(running)
        seconds = self.clock() - began
        seconds -= rounds * self._timed()
        self.decoder.clear()
        return seconds

    def longest_context(self) -> int:
        """The longest prompt after which all timed steps still fit the model."""
        return self.facts.max_length - self.steps - 8

    def _fill(self, lengths: Sequence[int]) -> list[Completion]:
        running = self._add(lengths)
        self._until_all_run(running)
        return running

    def _add(self, lengths: Sequence[int]) -> list[Completion]:
        chance = random.Random(sum(lengths))
        running = []
        for index, length in enumerate(lengths):
            limit = self.facts.max_length - length
            prompt = [chance.randrange(self.facts.vocab_size) for _ in range(length)]
            sampling = SamplingParams(max_completion_length=limit)
            running.append(Completion(GenerationRequest(f"profile/{index}", prompt, sampling), limit, index))
            self.decoder.add(running[-1])
        return running

    def _until_all_run(self, running: Sequence[Completion]) -> int:
        for rounds in range(1, ROUNDS_TO_START):
            self.decoder.step()
            if any(completion.finish_reason for completion in running):
                raise ModelError(
                    f"expected {len(running)} completions to run at once, got one that ended before all had begun; "
                    "lower generation.max_num_seqs, or give the key-value cache more memory"
                )
            if all(completion.generated for completion in running):
                return rounds
        raise ModelError(f"expected {len(running)} completions to start, got none after {ROUNDS_TO_START} steps")

    def _timed(self) -> float:
        """Seconds of a step, after one that does not count."""
        self.decoder.step()
        seconds = []
        for _ in range(self.steps):
            began = self.clock()
            self.decoder.step()
            seconds.append(self.clock() - began)
        return statistics.median(seconds)


def _cached(running: Sequence[Completion]) -> int:
    return sum(completion.position for completion in running)


def uneven(longest: int, number: int) -> list[int]:
    """So many lengths, from the longest down to an eighth of it, each the same share of the one before."""
    share = UNEVEN ** (1 / max(1, number - 1))
    return [max(1, round(longest * share**index)) for index in range(number)]
