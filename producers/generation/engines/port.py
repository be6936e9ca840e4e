"""A generation engine and its tokenizer as the worker sees them, and the rule by which both refuse a prompt.

Below them: a decoder, which computes for an engine's thread, and the completions that it runs.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from streamrl.schemas.errors import EngineError, ModelError, PromptRefused
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Prompt, SamplingParams

if TYPE_CHECKING:
    from streamrl.producers.generation.engines.model_files import ModelFacts
    from streamrl.producers.generation.incremental_text import StopMatcher

WeightsT = TypeVar("WeightsT")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Sample one completion of these prompt tokens; ``prompt``: what they were made of, if that is known.

    ``prefix_token_ids``: the completion's first tokens, sampled before, here or elsewhere. They count as its own, for
    the most tokens it may have as for stop strings; the deltas are of what comes behind them. Nothing comes but the
    reason if they are a whole completion.
    ``chunk_tokens``: gathered before they are handed over, none for as many as the engine's settings say.
    ``interactive``: somebody waits for the first token, so it is begun as soon as a slot is free.
    ``traceparent``: of the span that it is a part of, as W3C has it; empty: it is traced in no other way than orders.
    ``json_schema``: as text, which the completion is to fit; empty: none. Then there is no prefix.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    prompt: Prompt | None = None
    prefix_token_ids: Sequence[int] = ()
    chunk_tokens: int | None = None
    interactive: bool = False
    traceparent: str = ""
    json_schema: str = ""

    @property
    def context_token_ids(self) -> list[int]:
        """What the first new token is sampled behind."""
        return [*self.prompt_token_ids, *self.prefix_token_ids]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens just sampled, all by one version, with the log-probabilities they were sampled with.

    ``logprobs`` are over the whole vocabulary at the sampling temperature, in nats: as the trainer will compute them,
    whatever top-p, top-k and min-p keep from being sampled; but under a JSON schema over the tokens that it leaves. The
    end-of-sequence token is part of the completion, and so are the tokens of a stop string. The last delta of a request
    carries the finish reason, and may be empty.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: PolicyVersion
    finish_reason: FinishReason | None = None


class Interrupted(EngineError):
    """The request was interrupted, and all that was sampled of it has been handed over."""


class Engine(Protocol):
    """Samples completions in a continuously refilled batch, and takes new weights between decode steps."""

    name: str
    max_num_seqs: int

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of context that the key-value cache holds, of all completions together; none: its slots bound it.

        Known once the engine has started.
        """
        ...

    async def start(self) -> None:
        """Load the model.

        Raises:
            ModelError: it cannot be loaded.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Sample one completion. Closing the iterator early frees its slot.

        Raises:
            Interrupted: ``interrupt`` was called.
            EngineError: the engine failed; the request may be made again.
            PromptRefused: the engine runs on, and will never sample this prompt, or never to this schema.
        """
        ...

    def interrupt(self, request_id: str) -> bool:
        """Sample no more of a completion: what there is of it is handed over, then ``generate`` raises ``Interrupted``.

        One that is whole by then ends as if nobody had asked. False: the engine has no such request.
        """
        ...

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """Load verified weights between decode steps. Running sequences go on with their key-value cache, or, where
        ``generation.adopt`` says so, with one computed anew by these weights, of all tokens so far.

        Raises:
            WeightsError: the weights do not fit this model; the old ones stay.
        """
        ...

    async def close(self) -> None:
        """Stop and release everything; idempotent."""
        ...


class Tokenizer(Protocol):
    """Text ↔ token ids, as the policy's own tokenizer does it."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat turns through the model's chat template."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, special tokens left out."""
        ...


MAX_SAID = 200
"""Characters of what a chat template says, which may print the whole prompt."""


def encoded(tokenizer: Tokenizer, prompt: Prompt, longest: int) -> list[int]:
    """The prompt's tokens, ``longest`` at most.

    Raises:
        PromptRefused: it has no tokens or too many, or cannot be tokenised.
    """
    try:
        token_ids = tokenizer.encode_prompt(prompt)
    except ModelError as error:  # names what the model lacks, and for which prompts
        raise PromptRefused("no chat template", str(error)) from error
    except Exception as error:  # chat templates raise what they like
        said = f"{type(error).__name__}: {error}"[:MAX_SAID]
        raise PromptRefused("cannot be tokenised", f"expected a prompt that can be tokenised, got {said}") from error
    refuse_unfit(token_ids, longest)
    return token_ids


def refuse_unfit(token_ids: Sequence[int], longest: int) -> None:
    """Refuse a prompt of no tokens, or of more than ``longest``.

    Raises:
        PromptRefused: it is one.
    """
    expected = f"expected a prompt of 1 to {longest} tokens, got {len(token_ids)}"
    if not token_ids:
        raise PromptRefused("no tokens", expected)
    if len(token_ids) > longest:
        raise PromptRefused(f"longer than {longest} tokens", expected)


def refuse_schema(request: GenerationRequest, engine: str) -> None:
    """Refuse a request that is to fit a JSON schema, in an engine that cannot see to it."""
    if request.json_schema:
        raise PromptRefused("a JSON schema", f"expected no JSON schema, which no {engine} engine keeps to, got one")


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

    def load(self) -> "ModelFacts":
        """Load the model.

        Raises:
            ModelError: it cannot be loaded.
        """
        ...

    def give_up(self) -> None:
        """Have ``load`` or ``read_weights``, if one of them runs, fail soon, where it can; called from any thread."""
        ...

    def queue(self, completion: ActiveCompletion) -> None:
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
