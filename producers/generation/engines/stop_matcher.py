"""Looks for the stop strings of a completion while it grows, for all decoders alike."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamrl.producers.generation.engines.port import Tokenizer
from streamrl.producers.generation.incremental_text import IncrementalText
from streamrl.schemas.trajectories import SamplingParams

if TYPE_CHECKING:
    from streamrl.producers.generation.engines.port import ActiveCompletion


class StopMatcher:
    """Whether a completion that grows by a token contains one of its stop strings by now."""

    __slots__ = ("_decode", "_grown", "_overlap", "_sampling", "_seen", "_tail")

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self._sampling = sampling
        self._decode = tokenizer.decode
        self._grown = IncrementalText(tokenizer)
        # Text that may be the beginning of a stop string: all but its last character.
        self._overlap = max(len(one) for one in sampling.stop) - 1
        self._tail = ""
        self._seen = 0

    def go_on_behind(self, prefix: Sequence[int]) -> bool:
        """Take in what was sampled before; whether a stop string is in it."""
        self._seen = len(prefix)
        text = self._grown.go_on_behind(prefix)
        self._tail = text[max(0, len(text) - self._overlap) :]
        return self._sampling.find_stop(self._decode(list(prefix))) is not None

    def is_complete(self, completion: "ActiveCompletion") -> bool:
        """Take in what the completion has grown by, a token a decode step; whether a stop string ends there."""
        grown = completion.generated - self._seen
        if not grown:
            return False
        self._seen = completion.generated
        text = self._tail + self._grown.add(completion.tokens[-grown:])
        if self._sampling.find_stop(text) is not None:
            return True
        if self._grown.is_settled:
            self._tail = text[max(0, len(text) - self._overlap) :]
        return False
