"""The ports of a generation engine and its tokenizer, and the rule by which both refuse a prompt.

Below them: the port of a decoder, which computes for an engine's thread, and the completions that it runs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one completion of these prompt tokens. ``prompt``: the prompt that they encode, if known.

    ``prefix_token_ids``: the completion's first tokens, sampled before, here or elsewhere. They count towards the
    length limit and are searched for stop strings. Deltas contain only later tokens. If the prefix is a complete
    completion, there is one empty delta with the finish reason.
    ``chunk_tokens``: tokens that are gathered before they are handed over; None: as many as the engine usually does.
    ``interactive``: a user waits for the first token, so it starts as soon as a slot is free.
    ``traceparent``: W3C trace context of its parent span; empty: it is traced as work orders are.
    ``json_schema``: JSON schema, as text, that the completion must fit; empty: none. With a schema there is no prefix.
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
        """The tokens after which the first new token is sampled."""
        return [*self.prompt_token_ids, *self.prefix_token_ids]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Newly sampled tokens, all of one version, with their log-probabilities.

    ``logprobs`` are in nats, over the whole vocabulary at the sampling temperature, as the trainer will compute them:
    tokens that top-p, top-k and min-p exclude are included. Under a JSON schema they are over the tokens that the
    schema allows. The end-of-sequence token and the tokens of a stop string are part of the completion. A request's
    last delta has the finish reason, and may be empty.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: PolicyVersion
    finish_reason: FinishReason | None = None


class Interrupted(EngineError):
    """The request was interrupted. All of its sampled tokens have been handed over."""


class Engine(Protocol):
    """Samples completions in a continuously refilled batch, and takes new weights between decode steps."""

    name: str
    max_num_seqs: int

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the key-value cache holds for all completions together; None: only the slots are bounded.

        Known when the engine has started.
        """
        ...

    async def start(self) -> None:
        """Load the model.

        Raises:
            ModelError: the model cannot be loaded.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Sample one completion. Closing the iterator early frees its slot.

        Raises:
            Interrupted: ``interrupt`` was called.
            EngineError: the engine failed; the request may be repeated.
            PromptRefused: the engine works, but will never sample this prompt, or never with this schema.
        """
        ...

    def interrupt(self, request_id: str) -> bool:
        """Stop sampling a completion. Its tokens are handed over, then ``generate`` raises ``Interrupted``.

        A completion that is complete by then ends normally. Returns False if the engine does not have the request.
        """
        ...

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """Load verified weights between two decode steps.

        Running completions keep their key-value cache. If ``generation.adopt`` says so, the new weights recompute the
        cache of all tokens so far.

        Raises:
            WeightsError: the weights do not fit this model; the old ones stay in use.
        """
        ...

    async def close(self) -> None:
        """Stop and release everything; idempotent."""
        ...


class Tokenizer(Protocol):
    """Converts between text and token ids, as the policy's own tokenizer does."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Chat turns go through the model's chat template."""
        ...

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        """The decoder of the text in which stop strings are found, and which rewards see."""
        ...


MAX_SAID = 200
"""Characters of a chat template's error that are kept, since it may contain the whole prompt."""


def encoded(tokenizer: Tokenizer, prompt: Prompt, longest: int) -> list[int]:
    """The prompt's tokens, at most ``longest``.

    Raises:
        PromptRefused: the prompt has no tokens or too many, or cannot be tokenised.
    """
    try:
        token_ids = tokenizer.encode_prompt(prompt)
    except PromptRefused:
        raise
    except ModelError as error:  # the message names the missing template and the prompt
        raise PromptRefused("no chat template", str(error)) from error
    except Exception as error:  # chat templates may raise any exception
        said = f"{type(error).__name__}: {error}"[:MAX_SAID]
        raise PromptRefused("cannot be tokenised", f"expected a prompt that can be tokenised, got {said}") from error
    refuse_unfit(token_ids, longest)
    return token_ids


def refuse_unfit(token_ids: Sequence[int], longest: int) -> None:
    """Refuse a prompt without tokens, or with more than ``longest``.

    Raises:
        PromptRefused: the prompt does not fit.
    """
    expected = f"expected a prompt of 1 to {longest} tokens, got {len(token_ids)}"
    if not token_ids:
        raise PromptRefused("no tokens", expected)
    if len(token_ids) > longest:
        raise PromptRefused(f"longer than {longest} tokens", expected)


def refuse_unknown(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt with tokens that are not in the model's vocabulary.

    Raises:
        PromptRefused: there is such a token.
    """
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise PromptRefused(
            f"token ids above the model's {vocab_size}",
            f"expected token ids below {vocab_size}, got {min(token_ids)} to {max(token_ids)}; "
            "use the model's own tokenizer",
        )


def refuse_schema(request: GenerationRequest, engine: str) -> None:
    """Refuse a request with a JSON schema, in an engine that cannot enforce one.

    Raises:
        PromptRefused: the request has a schema.
    """
    if request.json_schema:
        raise PromptRefused(
            "a JSON schema", f"expected no JSON schema, which a {engine} engine cannot enforce, got one"
        )


class DecoderLost(EngineError):
    """The decoder's processes have ended, so it can do nothing more."""


class ActiveCompletion:
    """A completion in the engine: the request, and the tokens that are not handed over yet.

    ``limit``: most tokens that it may have; ``generated``: tokens that it has; both include the request's prefix.
    ``seed``: of its random numbers. ``matcher``: finds its stop strings, if it has any. ``sampled``: all tokens sampled
    here, if the decoder wants them kept. ``mailbox`` belongs to the event loop, the other fields to the engine's
    thread.
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
        # Input of the first decode step, for decoders that prefill all tokens but the last.
        self.last_token = (request.prefix_token_ids or request.prompt_token_ids)[-1]
        self.generated = len(request.prefix_token_ids)
        self.finish_reason: FinishReason | None = None
        self.matcher: StopMatcher | None = None

    @property
    def has_sampled(self) -> bool:
        """Whether any of its tokens was sampled here."""
        return self.generated > len(self.request.prefix_token_ids)

    @property
    def context_token_ids(self) -> list[int]:
        """The tokens after which the next one is sampled. Valid if ``sampled`` is kept, or no token was sampled yet."""
        return [*self.request.context_token_ids, *(self.sampled or ())]

    @property
    def position(self) -> int:
        """Index of the next input token, counted from the prompt's first token."""
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
        """The tokens since the last call of this, all of one version."""
        delta = TokenDelta(self.tokens, self.logprobs, version, self.finish_reason)
        # New lists rather than cleared ones: the event loop reads the old ones in the delta.
        self.tokens, self.logprobs = [], []
        return delta


class Decoder(Protocol[WeightsT]):
    """Computes completions for an engine's thread.

    Only ``read_weights``, ``give_up`` and ``kv_tokens`` may be used from other threads. After ``load``, methods may
    raise ``DecoderLost``.
    """

    name: str

    @property
    def kv_tokens(self) -> int | None:
        """See ``Engine``. May be read from any thread, and is None before ``load``."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def load(self) -> "ModelFacts":
        """Load the model.

        Raises:
            ModelError: the model cannot be loaded.
        """
        ...

    def give_up(self) -> None:
        """Make a running ``load`` or ``read_weights`` fail soon, if possible. May be called from any thread."""
        ...

    def queue(self, completion: ActiveCompletion) -> None:
        """Queue a completion. Completions start in order of arrival, as soon as there is room."""
        ...

    def drop(self, completion: ActiveCompletion) -> None:
        """Forget a completion, running or queued; unknown ones are ignored."""
        ...

    def step(self) -> Iterable[ActiveCompletion]:
        """Run one decode step. Returns the completions that grew or ended; ended ones are already removed.

        Raises:
            Exception: of the library; the caller calls ``clear`` next.
        """
        ...

    def pause(self) -> Iterable[ActiveCompletion]:
        """Stop sampling until ``adopt``. Yields completions that were sampled ahead, as ``step`` returns them.

        The caller processes each completion before it asks for the next. A completion comes once for each of its steps.
        """
        ...

    def clear(self) -> None:
        """Remove all completions."""
        ...

    def read_weights(self, directory: Path) -> WeightsT:
        """Check and read a directory of weights. May be called from any thread.

        Raises:
            WeightsError: they are unreadable or do not fit the model.
        """
        ...

    def adopt(self, weights: WeightsT) -> None:
        """Replace the weights by checked ones, after ``pause``. For key-value caches see ``Engine.adopt``."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
