"""What computes for an engine's thread: a decoder, and the completions that it runs."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from producers.generation.engines.model_files import ModelFacts
from producers.generation.engines.port import GenerationRequest, TokenDelta
from producers.generation.engines.stop_matcher import StopMatcher
from schemas.errors import EngineError
from schemas.identifiers import PolicyVersion
from schemas.trajectories import FinishReason

WeightsT = TypeVar("WeightsT")


class DecoderLost(EngineError):
    """What the decoder computes with has ended, and it can do nothing more."""


class ActiveCompletion:
    """A completion in the engine: the request, and the tokens that were not handed over yet.

    ``limit`` is the most tokens it may have and ``generated`` how many it has, those of the request's prefix included;
    ``seed`` drives its random numbers; ``matcher`` looks for its stop strings, if it has any; ``sampled``: all tokens
    sampled here, where the decoder asked for them to be kept; ``mailbox`` belongs to the event loop, all the rest to
    the engine's thread.
    """

    __slots__ = (
        "finish_reason",
        "generated",
        "last_token",
        "limit",
        "logprobs",
        "mailbox",
        "matcher",
        "request",
        "sampled",
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
        self.sampled: list[int] | None = None
        # What the first decode step is fed, where only the prompt's prefix is prefilled.
        self.last_token = (request.prefix_token_ids or request.prompt_token_ids)[-1]
        self.generated = len(request.prefix_token_ids)
        self.finish_reason: FinishReason | None = None
        self.matcher: StopMatcher | None = None

    @property
    def has_sampled(self) -> bool:
        """Whether a token of it was sampled here."""
        return self.generated > len(self.request.prefix_token_ids)

    @property
    def context_token_ids(self) -> list[int]:
        """What the next token is sampled behind; only where ``sampled`` is kept, or nothing was sampled yet."""
        return [*self.request.context_token_ids, *(self.sampled or ())]

    @property
    def position(self) -> int:
        """Where the token that is fed next stands, counted from the prompt's first token."""
        return len(self.request.prompt_token_ids) + self.generated - 1

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens with their log-probabilities in nats."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.generated += len(tokens)
        if self.sampled is not None:
            self.sampled.extend(tokens)
        if tokens:
            self.last_token = tokens[-1]

    def take(self, version: PolicyVersion) -> TokenDelta:
        """What was gathered since the last call, all of it sampled by one version."""
        delta = TokenDelta(self.tokens, self.logprobs, version, self.finish_reason)
        # New lists in place of cleared ones: the delta keeps the old ones, and the event loop reads them.
        self.tokens, self.logprobs = [], []
        return delta


class Decoder(Protocol[WeightsT]):
    """Called from one thread only, but for ``read_weights`` and ``give_up``; may raise ``DecoderLost`` once loaded."""

    name: str

    @property
    def kv_tokens(self) -> int | None:
        """See ``Engine``; may be read from any thread, and is none before ``load``."""
        ...

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

    def give_up(self) -> None:
        """Have ``load`` or ``read_weights``, if one of them runs, fail soon, where it can; called from any thread."""
        ...

    def add(self, completion: ActiveCompletion) -> None:
        """Queue a completion; it starts, in order of arrival, as soon as there is room."""
        ...

    def drop(self, completion: ActiveCompletion) -> None:
        """Forget a completion, running or queued; unknown ones are ignored."""
        ...

    def step(self) -> Iterable[ActiveCompletion]:
        """Sample once; returns the completions that grew or ended. Ended ones have been forgotten already.

        Raises:
            Exception: whatever the library raises; ``clear`` is called next.
        """
        ...

    def pause(self) -> Iterable[ActiveCompletion]:
        """Sample no more until ``adopt``; what was sampled ahead of the last step, as ``step`` returns it.

        Each completion is taken in before the next is asked for, and comes once for every step.
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
        """Put checked weights in place, after a pause; key-value caches as ``Engine.adopt`` has it."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
