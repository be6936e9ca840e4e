"""Makes one trajectory: sample, decode, score. Uses an engine, a tokenizer and a scorer, and knows no order topic.

Invariant every_sample_is_accounted_for: a prompt that cannot be sampled still gives a trajectory, without tokens and
rewards, so that its group can be completed and admission has room again.
"""

import math
import struct
import time
from array import array
from asyncio import Event, Future
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray
from pydantic import ValidationError

from streamrl.bus.port import Outgoing, Position, Publisher
from streamrl.producers.generation.engines.port import Engine, GenerationRequest, Interrupted, TokenDelta, Tokenizer
from streamrl.producers.rewards.runner import RewardScorer, ScoreRequest, Scores
from streamrl.schemas.codec import encode_token_chunk, headers_of
from streamrl.schemas.errors import BusError, EngineError, PromptRefused, Superseded
from streamrl.schemas.identifiers import PolicyVersion, group_id_of, make_trajectory_id
from streamrl.schemas.trajectories import (
    FinishReason,
    SamplingParams,
    TokenChunk,
    Trajectory,
    TrajectoryPart,
    VersionSpan,
    WorkOrder,
    aborted_trajectory,
    fields_from_order,
)

log = structlog.get_logger()

CHUNK_HEADERS = headers_of(TokenChunk)
MAX_PENDING = 1000
"""Most chunks of tokens that were handed to the broker and are not confirmed yet."""
MAX_HELD, MAX_ENDS = 8192, 1024
"""Most chunks that wait to be handed over, and places besides for chunks that end a completion: seconds of a large
batch.
"""


@dataclass(slots=True)
class _HeldOrder:
    """A held order. ``undelivered``: trajectory ids of its samples that are not delivered; ``unstarted``: those of them
    without a token; ``progress_at``: time of its last progress.
    """

    progress_at: float
    undelivered: set[str] = field(default_factory=set)
    unstarted: set[str] = field(default_factory=set)


@dataclass
class WorkerLoad:
    """A worker's load and counts, for its heartbeats.

    ``generating``: completions that are in the engine, running or waiting; the other counts are since the start.
    ``monotonic``: a monotonic clock, in seconds.
    """

    monotonic: Callable[[], float] = time.monotonic
    generating: int = 0
    generated_tokens: int = 0
    finished_trajectories: int = 0
    _orders: dict[str, _HeldOrder] = field(default_factory=dict)
    _sampled_at: float = -math.inf

    def took(self, trajectory_id: str) -> None:
        """Add a sample that this worker has to make."""
        order = self._orders.setdefault(group_id_of(trajectory_id), _HeldOrder(self.monotonic()))
        order.undelivered.add(trajectory_id)
        order.unstarted.add(trajectory_id)

    def sampled(self, trajectory_id: str, tokens: int) -> None:
        """Count new ``tokens`` of a sample."""
        self.generated_tokens += tokens
        self._sampled_at = self.monotonic()
        if (order := self._orders.get(group_id_of(trajectory_id))) is not None:
            order.progress_at = self._sampled_at
            order.unstarted.discard(trajectory_id)

    def let_go(self, trajectory_id: str) -> None:
        """Remove a sample that was delivered or abandoned."""
        group_id = group_id_of(trajectory_id)
        if (order := self._orders.get(group_id)) is not None:
            order.progress_at = self.monotonic()
            order.undelivered.discard(trajectory_id)
            order.unstarted.discard(trajectory_id)
            if not order.undelivered:
                del self._orders[group_id]

    def held_orders(self) -> dict[str, float]:
        """Seconds since the last progress of each held order, by group id: the content of ``Heartbeat.orders``."""
        now = self.monotonic()
        return {
            # An order that waits for a slot progresses as long as the orders before it do.
            group_id: now - max(order.progress_at, self._sampled_at if order.unstarted else order.progress_at)
            for group_id, order in self._orders.items()
        }


@dataclass
class Rollout:
    """Makes one worker's trajectories. ``load`` counts them. ``places``: entered while a sample is in the engine.

    ``chunk_tokens``: tokens of a completion that the engine gathers at once; None: as many as it usually does.
    """

    engine: Engine
    tokenizer: Tokenizer
    scorer: RewardScorer
    worker_id: str
    load: WorkerLoad = field(default_factory=WorkerLoad)
    tokens: "TokenStream | None" = None
    clock: Callable[[], float] = time.time
    places: "AbstractAsyncContextManager[None]" = field(default_factory=nullcontext)
    chunk_tokens: int | None = None

    async def sample(
        self,
        order: WorkOrder,
        sample_index: int,
        prompt_token_ids: Sequence[int],
        completion: "SampledCompletion | None" = None,
        on_growth: Callable[[], None] = lambda: None,
    ) -> Trajectory:
        """Sample and score one completion. If the engine fails, it gets one more request, for the missing tokens.

        ``completion``: tokens that were sampled before, by any worker. It grows, and ``on_growth`` is called each time.

        Raises:
            PromptRefused: the engine does not accept the prompt.
            Interrupted: the sample was interrupted; ``completion`` has all sampled tokens.
            EngineError: the engine failed twice, or returned an invalid completion.
        """
        trajectory_id = make_trajectory_id(order.group_id, sample_index)
        sampling = _own_seed(order, trajectory_id)
        request = GenerationRequest(
            trajectory_id, prompt_token_ids, sampling, order.prompt, chunk_tokens=self.chunk_tokens
        )
        completion = SampledCompletion() if completion is None else completion
        started_at = self.clock()
        # It is complete already if its earlier worker ended during scoring.
        if completion.finish_reason is None:
            self.load.generating += 1
            try:
                async with self.places:
                    await self._generate_twice(request, completion, on_growth)
            finally:
                self.load.generating -= 1
        # The slot is free now, so scoring does not delay the engine.
        decode = self.tokenizer.decoder_for(order.sampling)
        text = shown_text(decode(completion.token_ids), completion.finish_reason, order.sampling)
        scores = await self._score(order, completion, text)
        token_ids, logprobs = completion.arrays()
        try:
            return Trajectory(
                **fields_from_order(order, sample_index),
                prompt_token_ids=np.array(prompt_token_ids, dtype="<i4"),
                token_ids=token_ids,
                logprobs=logprobs,
                loss_mask=np.ones(len(token_ids), dtype="<u1"),
                version_spans=completion.version_spans(),
                finish_reason=completion.finish_reason,
                parts=completion.parts,
                prompt_text=order.prompt.text,
                completion_text=text,
                rewards=scores.rewards,
                reward_errors=scores.errors,
                started_at=started_at,
                finished_at=self.clock(),
            )
        except ValidationError as error:
            raise EngineError(f"expected a completion from {self.engine.name}, got: {error}") from error

    def refused(self, order: WorkOrder, sample_index: int, reason: str, cause: str = "") -> Trajectory:
        """The trajectory of a sample that cannot be made. Each reward has the reason instead of a value.

        ``cause``: kind of refusal, for a refused prompt.
        """
        return aborted_trajectory(
            order, sample_index, reason, rewards=self.scorer.names, now=self.clock(), refusal=cause
        )

    async def _score(self, order: WorkOrder, completion: "SampledCompletion", text: str) -> Scores:
        if completion.finish_reason is FinishReason.ABORT:  # an incomplete text would be scored as a complete one
            names = self.scorer.names
            return Scores(dict.fromkeys(names), dict.fromkeys(names, "the engine aborted the completion"))
        return await self.scorer.score(ScoreRequest(order.prompt, text, completion.token_ids))

    async def _generate_twice(
        self, request: GenerationRequest, completion: "SampledCompletion", on_growth: Callable[[], None]
    ) -> None:
        try:
            await self._generate(request, completion, on_growth)
        except (PromptRefused, Interrupted):
            raise  # a retry would be refused again, or is not wanted
        except EngineError as error:
            # One failed decode step fails all completions of its batch, though most did not cause it.
            log.warning("request failed, trying it again", request=request.request_id, error=str(error))
            await self._generate(request, completion, on_growth)

    async def _generate(
        self, request: GenerationRequest, completion: "SampledCompletion", on_growth: Callable[[], None]
    ) -> None:
        if completion.token_ids:
            request = replace(request, prefix_token_ids=completion.token_ids.tolist())
        async with closed_early(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                # Index of the delta's first token in the completion; read before ``extend`` changes it.
                start = len(completion.token_ids)
                completion.extend(delta)
                self.load.sampled(request.request_id, len(delta.token_ids))
                on_growth()
                if self.tokens is not None:
                    self.tokens.offer(request.request_id, start, delta)
        if completion.finish_reason is None:
            raise EngineError(f"expected a finish reason for {request.request_id} from {self.engine.name}, got none")


@asynccontextmanager
async def closed_early(deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[AsyncIterator[TokenDelta]]:
    """Close an async generator when its reader leaves early, so that its slot in the engine is free at once."""
    try:
        yield deltas
    finally:
        # Leaving `async for` does not close a generator; asyncio closes it only when it is garbage-collected. The port
        # promises an async iterator, and only generators have ``aclose``.
        if (close := getattr(deltas, "aclose", None)) is not None:
            await close()


def shown_text(text: str, finish_reason: FinishReason | None, sampling: SamplingParams) -> str:
    """The text that rewards see: up to the stop string, or including it if the sampling parameters say so.

    Text of the last token after the stop string is cut off. All tokens are kept, since they were sampled.
    """
    span = sampling.find_stop(text) if finish_reason is FinishReason.STOP else None
    if span is None:
        return text
    start, end = span
    return text[: end if sampling.include_stop_str_in_output else start]


def _own_seed(order: WorkOrder, trajectory_id: str) -> SamplingParams:
    """Sampling parameters with a seed of the sample's own, derived from the run's seed, for each attempt another."""
    sampling = order.sampling
    if sampling.seed is None:
        return sampling
    # 31 bits, since every engine accepts such a seed.
    name = f"{trajectory_id}@{order.attempt}"
    seed = xxhash.xxh32_intdigest(name.encode(), seed=sampling.seed & 0xFFFFFFFF) & 0x7FFFFFFF
    return sampling.model_copy(update={"seed": seed})


@dataclass(slots=True)
class SampledCompletion:
    """The sampled tokens of one completion so far. ``extend`` it with every delta.

    ``parts``: the workers that sampled it and their parts, if there was more than one. ``_spans`` encodes the versions
    as runs: each version with the end of its last token.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish_reason: FinishReason | None = None
    parts: tuple[TrajectoryPart, ...] = ()
    _spans: list[tuple[PolicyVersion, int]] = field(default_factory=list)

    def extend(self, delta: TokenDelta) -> None:
        """Append the delta's tokens.

        Raises:
            EngineError: the delta has unequal numbers of log-probabilities and tokens, or invalid token ids.
        """
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(
                f"expected one logprob per token from the engine, got {len(delta.logprobs)} for {len(delta.token_ids)}"
            )
        # Set before the return: the last delta may have a reason and no tokens.
        self.finish_reason = delta.finish_reason
        if not delta.token_ids:
            return
        try:
            self.token_ids.extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
        except (TypeError, OverflowError) as error:
            raise EngineError(f"expected token ids and logprobs from the engine, got: {error}") from error
        self._note_version(delta.version, len(self.token_ids))

    def take(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], spans: Iterable[VersionSpan]) -> None:
        """Append tokens that were sampled before, with the spans that cover them."""
        self.token_ids.frombytes(token_ids.tobytes())
        self.logprobs.frombytes(logprobs.tobytes())
        for span in spans:
            self._note_version(span.version, span.end)

    def append(self, other: "SampledCompletion") -> None:
        """Append another completion. Tokens appended directly before it count to its first version."""
        start = len(self.token_ids)
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)
        for span in other.version_spans():
            self._note_version(span.version, start + span.end)
        self.finish_reason = other.finish_reason

    def _note_version(self, version: PolicyVersion, end: int) -> None:
        # A changed version starts a new run of tokens; otherwise the last run grows.
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, end))
        else:
            self._spans[-1] = (version, end)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens. Adjacent spans differ, and together they cover the completion."""
        # Each span starts where the previous one ends. The last end starts no span, hence strict=False.
        starts = [0, *(end for _, end in self._spans)]
        return tuple(
            VersionSpan(version=version, start=start, end=end)
            for start, (version, end) in zip(starts, self._spans, strict=False)
        )

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids int32 (T) and log-probabilities float32 (T), without a copy; do not extend afterwards."""
        # While numpy exports an array's buffer, extending the array raises BufferError.
        return np.frombuffer(self.token_ids, dtype="<i4"), np.frombuffer(self.logprobs, dtype="<f4")


@dataclass
class TokenStream:
    """Publishes tokens as they are sampled: one ``TokenChunk`` for each delta, keyed by trajectory id, in order.

    Chunks are published at most once, and sampling never waits for them. ``offer`` puts a chunk into a buffer of
    ``MAX_HELD`` places, and ``publish_loop`` sends it. While the buffer is full, new chunks are dropped and counted.
    Readers detect a gap, since ``start`` numbers the tokens. A trajectory's last chunk, which has the finish reason,
    may use ``MAX_ENDS`` further places.
    """

    publisher: Publisher
    topic: str
    worker_id: str
    dropped: int = 0
    _held: deque[tuple[str, int, TokenDelta]] = field(default_factory=deque)
    _pending: int = 0
    _wake: Event = field(default_factory=Event)

    def offer(self, trajectory_id: str, start: int, delta: TokenDelta) -> None:
        """Buffer a delta, or drop it if the buffer is full. ``start``: index of its first token in the completion."""
        if len(self._held) >= MAX_HELD + (MAX_ENDS if delta.finish_reason is not None else 0):
            self.dropped += 1
            if self.dropped.bit_count() == 1:  # 1, 2, 4, 8, ...
                log.warning("the broker does not keep up with the stream of tokens", dropped_chunks=self.dropped)
            return
        self._held.append((trajectory_id, start, delta))
        self._wake.set()

    async def publish_loop(self) -> None:
        """Publish buffered chunks until cancelled.

        Consumes: offered deltas. Produces: token chunks.
        Waits for: the broker, when ``MAX_PENDING`` chunks are unconfirmed.
        On failure: a chunk that the broker does not accept is dropped and counted.
        On stop: is cancelled; buffered chunks are lost.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._held and self._pending < MAX_PENDING:
                name, start, delta = self._held.popleft()
                tokens = delta.token_ids, delta.logprobs
                try:
                    chunk = encode_token_chunk(name, self.worker_id, start, delta.version, tokens, delta.finish_reason)
                    sent = await self.publisher.submit(Outgoing(self.topic, chunk, name, headers=CHUNK_HEADERS))
                except (BusError, Superseded, struct.error, OverflowError):  # the last two: invalid tokens
                    self.dropped += 1
                    continue
                # Counted after ``submit``: if that raises, ``_settle`` is never called to count it down.
                self._pending += 1
                sent.add_done_callback(self._settle)

    def _settle(self, sent: "Future[Position]") -> None:
        self._pending -= 1
        self._wake.set()
        # ``cancelled`` is checked first, because ``exception`` of a cancelled future raises.
        if not sent.cancelled() and sent.exception() is not None:
            self.dropped += 1  # if the outcome is unknown, the chunk may have arrived after all
