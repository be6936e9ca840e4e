"""Makes one trajectory: sample, decode, score. Knows an engine, a tokenizer and a scorer, but no topic of orders.

Invariant every_sample_is_accounted_for: a prompt that cannot be sampled still gives a trajectory, without tokens and
without rewards, so that its group can be completed and its place in the pipeline is given back.
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
    origin_of,
)

log = structlog.get_logger()

CHUNK_HEADERS = headers_of(TokenChunk)
MAX_PENDING = 1000
"""Chunks of tokens handed to the broker and not confirmed yet."""
MAX_HELD, MAX_ENDS = 8192, 1024
"""Chunks that wait to be handed over, and those besides that end a completion: seconds of a large batch."""


@dataclass(slots=True)
class _HeldOrder:
    """Trajectory ids of the samples not delivered yet, and those of them without a token; when it progressed last."""

    progress_at: float
    undelivered: set[str] = field(default_factory=set)
    unstarted: set[str] = field(default_factory=set)


@dataclass
class WorkerLoad:
    """What a worker does and has done, which its heartbeats tell.

    ``generating`` counts completions in the engine (running or waiting there); the others count since the start.
    ``monotonic``: seconds on a clock that nobody sets.
    """

    monotonic: Callable[[], float] = time.monotonic
    generating: int = 0
    generated_tokens: int = 0
    finished_trajectories: int = 0
    _orders: dict[str, _HeldOrder] = field(default_factory=dict)
    _sampled_at: float = -math.inf

    def took(self, trajectory_id: str) -> None:
        """A sample of an order is this worker's to make."""
        order = self._orders.setdefault(group_id_of(trajectory_id), _HeldOrder(self.monotonic()))
        order.undelivered.add(trajectory_id)
        order.unstarted.add(trajectory_id)

    def sampled(self, trajectory_id: str, tokens: int) -> None:
        """So many more tokens of a sample."""
        self.generated_tokens += tokens
        self._sampled_at = self.monotonic()
        if (order := self._orders.get(group_id_of(trajectory_id))) is not None:
            order.progress_at = self._sampled_at
            order.unstarted.discard(trajectory_id)

    def let_go(self, trajectory_id: str) -> None:
        """A sample was delivered, or abandoned."""
        group_id = group_id_of(trajectory_id)
        if (order := self._orders.get(group_id)) is not None:
            order.progress_at = self.monotonic()
            order.undelivered.discard(trajectory_id)
            order.unstarted.discard(trajectory_id)
            if not order.undelivered:
                del self._orders[group_id]

    def held_orders(self) -> dict[str, float]:
        """Seconds since the last progress of each order held, by group id, as ``Heartbeat.orders`` means it."""
        now = self.monotonic()
        return {
            # What waits for a slot gets on as long as those before it do.
            group_id: now - max(order.progress_at, self._sampled_at if order.unstarted else order.progress_at)
            for group_id, order in self._orders.items()
        }


@dataclass
class Rollout:
    """Samples for one worker; ``load`` counts what it does. ``places``: entered while a sample is in the engine."""

    engine: Engine
    tokenizer: Tokenizer
    scorer: RewardScorer
    worker_id: str
    load: WorkerLoad = field(default_factory=WorkerLoad)
    tokens: "TokenStream | None" = None
    clock: Callable[[], float] = time.time
    places: "AbstractAsyncContextManager[None]" = field(default_factory=nullcontext)

    async def sample(
        self,
        order: WorkOrder,
        sample_index: int,
        prompt_token_ids: Sequence[int],
        completion: "SampledCompletion | None" = None,
        on_growth: Callable[[], None] = lambda: None,
    ) -> Trajectory:
        """Sample and score one completion; a failing engine is asked once more, for what is missing.

        ``completion``: what was sampled of it before, by whomever; it grows, and ``on_growth`` is called each time.

        Raises:
            PromptRefused: the engine does not take such a prompt.
            Interrupted: the engine was told to; ``completion`` has all that was sampled.
            EngineError: it failed twice, or returned what is not a completion.
        """
        trajectory_id = make_trajectory_id(order.group_id, sample_index)
        request = GenerationRequest(trajectory_id, prompt_token_ids, _own_seed(order, trajectory_id), order.prompt)
        completion = SampledCompletion() if completion is None else completion
        started_at = self.clock()
        # Whole already, if its worker ended while it was scored.
        if completion.finish_reason is None:
            self.load.generating += 1
            try:
                async with self.places:
                    await self._generate_twice(request, completion, on_growth)
            finally:
                self.load.generating -= 1
        # The slot is free by now: scoring costs the engine nothing.
        text = shown_text(self.tokenizer.decode(completion.token_ids), completion.finish_reason, order.sampling)
        scores = await self._score(order, completion, text)
        token_ids, logprobs = completion.arrays()
        try:
            return Trajectory(
                **origin_of(order, sample_index),
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
        """The trajectory of a sample that was never made, with the reason in place of each reward.

        ``cause``: of a refused prompt.
        """
        return aborted_trajectory(
            order, sample_index, reason, rewards=self.scorer.names, now=self.clock(), refusal=cause
        )

    async def _score(self, order: WorkOrder, completion: "SampledCompletion", text: str) -> Scores:
        if completion.finish_reason is FinishReason.ABORT:  # half a text would be scored as if it were a whole one
            names = self.scorer.names
            return Scores(dict.fromkeys(names), dict.fromkeys(names, "the engine gave up on the completion"))
        return await self.scorer.score(ScoreRequest(order.prompt, text, completion.token_ids))

    async def _generate_twice(
        self, request: GenerationRequest, completion: "SampledCompletion", on_growth: Callable[[], None]
    ) -> None:
        try:
            await self._generate(request, completion, on_growth)
        except (PromptRefused, Interrupted):
            raise  # the answer would be the same, or nobody wants one
        except EngineError as error:
            # One failed decode step fails every completion of its batch, most of which had no part in it.
            log.warning("request failed, asking once more", request=request.request_id, error=str(error))
            await self._generate(request, completion, on_growth)

    async def _generate(
        self, request: GenerationRequest, completion: "SampledCompletion", on_growth: Callable[[], None]
    ) -> None:
        if completion.token_ids:
            request = replace(request, prefix_token_ids=completion.token_ids.tolist())
        async with closed_early(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                # Taken before extend: where the delta's first token stands in the completion.
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
    """Closes an async generator when its reader leaves early, so that its slot in the engine is free at once."""
    try:
        yield deltas
    finally:
        # Leaving `async for` does not close a generator; asyncio would, but only once it is garbage-collected. The port
        # promises any async iterator, and only generators have aclose.
        if (close := getattr(deltas, "aclose", None)) is not None:
            await close()


def shown_text(text: str, finish_reason: FinishReason | None, sampling: SamplingParams) -> str:
    """The text that rewards see: up to the stop string, or to its end if that was asked for.

    What the last token says behind it is cut off. The tokens themselves are all kept: they were sampled.
    """
    span = sampling.find_stop(text) if finish_reason is FinishReason.STOP else None
    if span is None:
        return text
    start, end = span
    return text[: end if sampling.include_stop_str_in_output else start]


def _own_seed(order: WorkOrder, trajectory_id: str) -> SamplingParams:
    """The order's seed is the run's: each sample of each attempt draws random numbers of its own from it."""
    sampling = order.sampling
    if sampling.seed is None:
        return sampling
    # 31 bits: what every engine takes for a seed.
    name = f"{trajectory_id}@{order.attempt}"
    seed = xxhash.xxh32_intdigest(name.encode(), seed=sampling.seed & 0xFFFFFFFF) & 0x7FFFFFFF
    return sampling.model_copy(update={"seed": seed})


@dataclass(slots=True)
class SampledCompletion:
    """What was sampled of one completion so far: ``extend`` it with every delta.

    ``parts``: who sampled what of it, if it was more than one worker. ``_spans`` encodes the versions by runs: each
    version with the number of tokens up to its last one.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish_reason: FinishReason | None = None
    parts: tuple[TrajectoryPart, ...] = ()
    _spans: list[tuple[PolicyVersion, int]] = field(default_factory=list)

    def extend(self, delta: TokenDelta) -> None:
        """Append the delta's tokens.

        Raises:
            EngineError: the delta has not as many log-probabilities as tokens, or token ids that are none.
        """
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(
                f"expected one logprob per token from the engine, got {len(delta.logprobs)} for {len(delta.token_ids)}"
            )
        # Before the return: the last delta may carry the reason and no token.
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
        """Append tokens that were sampled before, with the spans that tile them."""
        self.token_ids.frombytes(token_ids.tobytes())
        self.logprobs.frombytes(logprobs.tobytes())
        for span in spans:
            self._note_version(span.version, span.end)

    def append(self, other: "SampledCompletion") -> None:
        """Append all of another one; what was appended by hand before it counts to the first of its versions."""
        start = len(self.token_ids)
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)
        for span in other.version_spans():
            self._note_version(span.version, start + span.end)
        self.finish_reason = other.finish_reason

    def _note_version(self, version: PolicyVersion, end: int) -> None:
        # A new run of tokens where the version changed, else the last run grows.
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, end))
        else:
            self._spans[-1] = (version, end)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens; adjacent spans differ, together they cover the completion."""
        # Each span starts where the one before ends; the last end starts none, hence strict=False.
        starts = [0, *(end for _, end in self._spans)]
        return tuple(
            VersionSpan(version=version, start=start, end=end)
            for start, (version, end) in zip(starts, self._spans, strict=False)
        )

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids int32 (T) and log-probabilities float32 (T), without a copy; do not extend afterwards."""
        # While numpy holds an array's buffer, the array cannot grow: extend would raise BufferError.
        return np.frombuffer(self.token_ids, dtype="<i4"), np.frombuffer(self.logprobs, dtype="<f4")


@dataclass
class TokenStream:
    """Publishes tokens as they are sampled: one ``TokenChunk`` a delta, keyed by trajectory id, in the order of each.

    At most once, and never waited for: ``offer`` puts a chunk into a buffer of ``MAX_HELD`` and ``publish_loop`` brings
    it out. While that is full, new chunks are dropped and counted. A reader sees the gap, since ``start`` numbers the
    tokens; the last chunk of a trajectory, which says why it ended, has ``MAX_ENDS`` places more.
    """

    publisher: Publisher
    topic: str
    worker_id: str
    dropped: int = 0
    _held: deque[tuple[str, int, TokenDelta]] = field(default_factory=deque)
    _pending: int = 0
    _wake: Event = field(default_factory=Event)

    def offer(self, trajectory_id: str, start: int, delta: TokenDelta) -> None:
        """Take a delta whose first token is the completion's ``start``-th, or drop it."""
        if len(self._held) >= MAX_HELD + (MAX_ENDS if delta.finish_reason is not None else 0):
            self.dropped += 1
            if self.dropped.bit_count() == 1:  # 1, 2, 4, 8, ...
                log.warning("the broker does not keep up with the stream of tokens", dropped_chunks=self.dropped)
            return
        self._held.append((trajectory_id, start, delta))
        self._wake.set()

    async def publish_loop(self) -> None:
        """Bring chunks to the broker.

        Consumes: what was offered. Produces: token chunks.
        Waits for: the broker, of which ``MAX_PENDING`` may be unconfirmed.
        On failure: a chunk that is not taken is dropped and counted.
        On stop: is cancelled; what is held is lost.
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
                except (BusError, Superseded, struct.error, OverflowError):  # or what no token is: told elsewhere
                    self.dropped += 1
                    continue
                # Counted behind submit: had that raised, nothing would ever count it down.
                self._pending += 1
                sent.add_done_callback(self._settle)

    def _settle(self, sent: "Future[Position]") -> None:
        self._pending -= 1
        self._wake.set()
        # Asked first, because exception() of a cancelled future raises.
        if not sent.cancelled() and sent.exception() is not None:
            self.dropped += 1  # or unknown: then it may be there
