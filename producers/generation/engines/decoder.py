"""What a decoder is: it samples one token for every running completion per step, in one thread, without asyncio.

Knows neither the event loop nor weight versions; ``threaded.py`` adds both.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from producers.generation.engines.facts import ModelFacts
from schemas.errors import EngineError
from schemas.identifiers import PolicyVersion
from schemas.messages.trajectories import FinishReason
from schemas.ports.engine import GenerationRequest, TokenDelta

WeightsT = TypeVar("WeightsT")


class Completion:
    """A completion that grows: the request, and the tokens that were not handed over yet.

    ``limit`` is the most tokens it may have; ``seed`` drives its random numbers; ``mailbox`` belongs to the event loop.
    """

    __slots__ = (
        "finish_reason",
        "generated",
        "last_token",
        "limit",
        "logprobs",
        "mailbox",
        "request",
        "seed",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, limit: int, seed: int) -> None:
        self.request = request
        self.limit = limit
        self.seed = seed
        self.mailbox: asyncio.Queue[TokenDelta | EngineError] = asyncio.Queue()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.last_token = request.prompt_token_ids[-1]
        self.generated = 0
        self.finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """Where the token that is fed next stands, counted from the prompt's first token."""
        return len(self.request.prompt_token_ids) + self.generated - 1

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens with their log-probabilities in nats."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.generated += len(tokens)
        if tokens:
            self.last_token = tokens[-1]

    def take(self, version: PolicyVersion) -> TokenDelta:
        """What was gathered since the last call, all of it sampled by one version."""
        delta = TokenDelta(self.tokens, self.logprobs, version, self.finish_reason)
        self.tokens, self.logprobs = [], []
        return delta


class Decoder(Protocol[WeightsT]):
    """All methods but ``read_weights`` are called from one thread only."""

    name: str

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def load(self) -> ModelFacts:
        """Load the model.

        Raises:
            ModelError: it cannot be loaded.
        """
        ...

    def add(self, completion: Completion) -> None:
        """Queue a completion; it starts, in order of arrival, as soon as there is room."""
        ...

    def drop(self, completion: Completion) -> None:
        """Forget a completion, running or queued; unknown ones are ignored."""
        ...

    def step(self) -> Iterable[Completion]:
        """Sample once; returns the completions that grew or ended. Ended ones have been forgotten already.

        Raises:
            Exception: whatever the library raises; ``clear`` is called next.
        """
        ...

    def clear(self) -> None:
        """Forget every completion."""
        ...

    def read_weights(self, directory: Path) -> WeightsT:
        """Check and read a directory of weights; called from any thread.

        Raises:
            WeightsError: they are unreadable or do not fit the model.
        """
        ...

    def adopt(self, weights: WeightsT) -> None:
        """Put checked weights in place; key-value caches stay."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
