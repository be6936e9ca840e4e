"""An engine without a model: it really waits for as long as sampling would take. Uses no tensors and no thread.

``EmulatedEngine`` keeps callers and the event loop's timer. ``EmulatedBatch`` computes which completion gets how many
tokens, and when. Emulated time runs ``time_scale`` times as fast as the wall clock, from the start of the engine. The
batch does not know when the event loop really woke up: after a late wake-up tokens are handed over late, but later
steps are on time again.

``FillerTokenizer`` and ``ConstantRewards`` replace the tokenizer and the rewards.

Invariants: a_late_wake_up_delays_no_later_step; closing_the_iterator_frees_the_slot; every_delta_is_of_one_version;
fast_forward_equals_step_by_step; every_token_belongs_to_the_version_of_its_step.
"""

import asyncio
import heapq
import math
import sys
import time
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from streamrl.bus.waiting import in_thread
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings, trace_length
from streamrl.producers.generation.engines.port import (
    Decode,
    GenerationRequest,
    Interrupted,
    TokenDelta,
    refuse_schema,
    refuse_unfit,
)
from streamrl.producers.rewards.runner import ScoreRequest, Scores
from streamrl.schemas.errors import EngineError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from streamrl.schemas.trajectories import FinishReason, Prompt, SamplingParams

log = structlog.get_logger()

V = TypeVar("V")

FILLER_ID = 1
PROMPT_IDS = 1 << 30
"""Possible ids of an emulated prompt's first token: as many as an emulated trainer takes."""
FILLER_LOGPROB = -1.0
REWARD = 1.0
SHORTEST_SLEEP_S = 0.0005
"""Shortest timer, in seconds: the event loop's timers may fire up to this much early."""
_UNPUBLISHED = PolicyVersion(0, 0)
"""Version before the first weights; trainers number lineages from 1."""


@dataclass(slots=True, eq=False)
class EmulatedSequence:
    """A completion of ``length`` tokens: it waits until ``first_step`` is set, and then gets one token a step.

    ``handed``: number of tokens that were handed over here, or sampled elsewhere. While it waits it has no others. It
    waits again after it lost its cache. ``first_step``: the step at which its first token was sampled, or would have
    been without such interruptions. ``entry``: number of its valid entry in the batch's heap. ``group``: samples of one
    prompt, which share a prefill if they are admitted together.
    """

    prompt_tokens: int
    length: int
    arrived_at: float = 0.0
    first_step: int | None = None
    handed: int = 0
    entry: int = 0
    group: str = ""
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class TokensSampled(Generic[V]):
    """Tokens to hand over. ``parts``: each version with the number of tokens that it sampled; ``is_over``: the
    completion is complete with them; ``is_interrupted``: it is incomplete, but no more is sampled here.
    """

    sequence: EmulatedSequence
    at: float
    parts: tuple[tuple[V, int], ...]
    is_over: bool
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class WeightsAdopted(Generic[V]):
    """From ``at`` on, decode steps use this version."""

    version: V
    at: float


@dataclass(slots=True)
class _Abort:
    at: float
    sequence: EmulatedSequence
    is_handed_over: bool = False


@dataclass
class EmulatedBatch(Generic[V]):
    """Continuous batching in emulated time: which completions run in which decode step, and when each step ends.

    Pure: it has no clock. Callers report events with their times, in order of time, and advance the batch to a moment.
    Steps between which nothing changes are taken together. At a boundary between two steps, in this order:

    1. completions that have all their tokens leave;
    2. aborted completions leave, and interrupted ones, which hand over their tokens;
    3. new weights are adopted, each in ``adopt_s``; with ``recomputes``, all caches are prefilled again, too;
    4. waiting completions are admitted in order of arrival, each in the time of its prompt's prefill.

    Events that arrive during this are processed before the next step starts. Then every running completion gets a
    token.

    With ``kv_tokens`` in the curve's settings the cache is bounded as vLLM's is. A completion is admitted if there is
    room for its prompt and a step of all completions. If a step has no room, the completions admitted last lose their
    cache until it has. They wait in front of all others, keep their tokens, and are prefilled with those when they are
    admitted again.

    ``at``: the current boundary, in seconds; ``steps``: decode steps taken; ``context``: tokens in all caches;
    ``version``: of the first step; ``preempted``: how often a completion lost its cache. ``_changes``: aborts and
    adoptions that no boundary has processed yet; ``_adopting``: processed adoptions that have not ended; ``_due``: a
    heap of (step, order of entry, sequence) with the next handovers of tokens; ``_active``: running completions, in
    order of admission; ``_since[i]``: the first step of ``_versions[i]``.
    """

    curve: DecodeCurve
    slots: int
    version: V
    recomputes: bool = False
    at: float = field(init=False, default=0.0)
    steps: int = field(init=False, default=0)
    running: int = field(init=False, default=0)
    context: int = field(init=False, default=0)
    preempted: int = field(init=False, default=0)
    _waiting: deque[EmulatedSequence] = field(init=False, default_factory=deque)
    _changes: "deque[_Abort | WeightsAdopted[V]]" = field(init=False, default_factory=deque)
    _adopting: "deque[WeightsAdopted[V]]" = field(init=False, default_factory=deque)
    _due: list[tuple[int, int, EmulatedSequence]] = field(init=False, default_factory=list)
    _entries: int = field(init=False, default=0)
    _active: list[EmulatedSequence] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._since, self._versions = [0], [self.version]

    def arrive(self, sequence: EmulatedSequence, at: float) -> None:
        """Add a completion that waits for a slot."""
        sequence.arrived_at = at
        self._waiting.append(sequence)

    def abort(self, sequence: EmulatedSequence, at: float) -> None:
        """Drop a completion at the next boundary."""
        self._changes.append(_Abort(at, sequence))

    def interrupt(self, sequence: EmulatedSequence, at: float) -> None:
        """Drop a completion at the next boundary, but hand over its tokens."""
        self._changes.append(_Abort(at, sequence, is_handed_over=True))

    def adopt(self, version: V, at: float) -> None:
        """Adopt new weights at the next boundary."""
        self._changes.append(WeightsAdopted(version, at))

    def advance(self, until: float) -> list[TokensSampled[V] | WeightsAdopted[V]]:
        """Go to the last boundary that is not after ``until``. Returns the events on the way."""
        events: list[TokensSampled[V] | WeightsAdopted[V]] = []
        while (event_at := self._next_event_at()) is not None or self.running:
            # An empty batch has no steps: its next boundary is at the next event.
            if not self.running and event_at is not None:
                self.at = max(self.at, event_at)
            if self.at > until:
                break
            self._process_events(events)
            # Prefills and adoptions may have moved the boundary beyond ``until``; aborts may have emptied the batch.
            if self.at > until or not self.running:
                continue
            self._make_room(events)
            wanted = self._steps_to_go()
            # Whole steps only: a step that would end after ``until`` is taken by a later call.
            taken = min(wanted, self.curve.steps_by(until, self.at, self.running, self._tokens_to_read()))
            self._decode(taken)
            self._hand_over(events)
            if taken < wanted:
                break
        # An adoption ends ``adopt_s`` after its boundary. If that is after ``until``, a later call returns it.
        while self._adopting and self._adopting[0].at <= until:
            events.append(self._adopting.popleft())
        return events

    def next_wake(self) -> float | None:
        """Time of the next handover or of the next boundary that processes an event; None if there is neither."""
        moments = [self._adopting[0].at] if self._adopting else []
        event_at = self._next_event_at()
        # Events up to the current boundary, and events of an empty batch, come first; else a step is running.
        if self.running and not self._has_room_for_a_step():
            moments.append(self.at)
        if event_at is not None and (event_at <= self.at or not self.running):
            moments.append(max(event_at, self.at))
        elif self.running:
            moments.append(self.at + self.curve.leg_s(self._steps_to_go(), self.running, self._tokens_to_read()))
        return min(moments, default=None)

    def _next_event_at(self) -> float | None:
        """Time of the first event that a boundary still has to process."""
        change = self._changes[0].at if self._changes else None
        # Without a free slot or room in the cache, an arrival has no effect before another completion leaves.
        if not self._waiting or not self._has_room_for(self._waiting[0]):
            return change
        arrival = self._waiting[0].arrived_at
        return arrival if change is None else min(change, arrival)

    def _process_events(self, events: list[TokensSampled[V] | WeightsAdopted[V]]) -> None:
        # Processing events takes time, in which more may arrive: all are processed before the next step.
        while (event_at := self._next_event_at()) is not None and event_at <= self.at:
            self.at += self._take_changes_s(events) + self._admit_s()

    def _take_changes_s(self, events: list[TokensSampled[V] | WeightsAdopted[V]]) -> float:
        stall = 0.0
        while self._changes and self._changes[0].at <= self.at:
            change = self._changes.popleft()
            if isinstance(change, _Abort):
                if change.is_handed_over and not change.sequence.is_gone:
                    sequence = change.sequence
                    parts = () if sequence.first_step is None else self._new_tokens(sequence)
                    events.append(TokensSampled(sequence, self.at, parts, is_over=False, is_interrupted=True))
                self._release(change.sequence)
                continue
            stall += self.curve.settings.adopt_s
            if self.recomputes:
                stall += sum(self.curve.prefill_s(self._cached_tokens(sequence)) for sequence in self._active)
            # Running completions continue: only tokens of later steps have this version.
            self._since.append(self.steps)
            self._versions.append(change.version)
            # Versions that arrived during the same step are loaded one after the other.
            self._adopting.append(WeightsAdopted(change.version, self.at + stall))
        return stall

    def _release(self, sequence: EmulatedSequence) -> None:
        if sequence.is_gone:
            return
        sequence.is_gone = True
        if sequence.first_step is None:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    def _tokens_to_read(self) -> int:
        """Tokens that the next step reads from the caches, including padding if that counts."""
        if not self.curve.settings.padding_counts:
            return self.context
        return self.running * max(self._cached_tokens(sequence) for sequence in self._active)

    def _cached_tokens(self, sequence: EmulatedSequence) -> int:
        """Tokens in a completion's cache: its prompt, and one for each step since its first."""
        assert sequence.first_step is not None
        return sequence.prompt_tokens + self.steps - sequence.first_step

    def _leave(self, sequence: EmulatedSequence) -> None:
        self._active.remove(sequence)
        self.running -= 1
        self.context -= self._cached_tokens(sequence)

    def _admit_s(self) -> float:
        stall = 0.0
        prefilled: set[str] = set()
        while self._waiting and self._has_room_for(self._waiting[0]) and self._waiting[0].arrived_at <= self.at:
            sequence = self._waiting.popleft()
            sequence.first_step = self.steps - sequence.handed
            self._active.append(sequence)
            self.running += 1
            self.context += sequence.prompt_tokens + sequence.handed
            self._schedule(sequence)
            # Tokens sampled before a loss of the cache are not shared with other samples of the prompt.
            if sequence.handed or sequence.group not in prefilled:
                stall += self.curve.prefill_s(sequence.prompt_tokens + sequence.handed)
            if sequence.group and not sequence.handed:
                prefilled.add(sequence.group)
        return stall

    def _has_room_for(self, sequence: EmulatedSequence) -> bool:
        """Whether a completion can be admitted now. An empty batch always admits it, or a long one would never run."""
        if self.running >= self.slots:
            return False
        kv_tokens, own = self.curve.settings.kv_tokens, sequence.prompt_tokens + sequence.handed
        return kv_tokens is None or not self.running or self.context + own + self.running + 1 <= kv_tokens

    def _has_room_for_a_step(self) -> bool:
        kv_tokens = self.curve.settings.kv_tokens
        return kv_tokens is None or self.running == 1 or self.context + self.running <= kv_tokens

    def _make_room(self, events: list[TokensSampled[V] | WeightsAdopted[V]]) -> None:
        """Take the cache from the completions admitted last, until the next step has room."""
        while not self._has_room_for_a_step():
            sequence = self._active[-1]
            # Handed over now, since its later tokens are not sampled at the steps that follow these.
            if parts := self._new_tokens(sequence):
                events.append(TokensSampled(sequence, self.at, parts, is_over=False))
            self._leave(sequence)
            sequence.first_step, sequence.entry = None, 0
            self._waiting.appendleft(sequence)
            self.preempted += 1

    def _schedule(self, sequence: EmulatedSequence) -> None:
        assert sequence.first_step is not None
        # 0 means the whole completion at once. It has n tokens after step ``first_step + n``.
        chunk = self.curve.settings.chunk_tokens or sequence.length
        due = sequence.first_step + min(sequence.length, sequence.handed + chunk)
        # The order of entry breaks ties, since sequences cannot be compared.
        self._entries += 1
        sequence.entry = self._entries
        heapq.heappush(self._due, (due, self._entries, sequence))

    def _steps_to_go(self) -> int:
        """Decode steps until the next handover, or until the boundary that processes the next event."""
        # Outdated entries of completions that lost their cache.
        while self._due[0][1] != self._due[0][2].entry:
            heapq.heappop(self._due)
        # Never 0: a running step ends before the next boundary processes events.
        steps = self._due[0][0] - self.steps
        if (kv_tokens := self.curve.settings.kv_tokens) is not None and self.running > 1:
            steps = min(steps, max(1, (kv_tokens - self.context) // self.running))
        if (event_at := self._next_event_at()) is not None:
            steps = min(steps, max(1, self.curve.steps_until(event_at, self.at, self.running, self._tokens_to_read())))
        return steps

    def _decode(self, steps: int) -> None:
        self.at += self.curve.leg_s(steps, self.running, self._tokens_to_read())
        self.steps += steps
        # Each running completion's cache grows by one token a step.
        self.context += self.running * steps

    def _hand_over(self, events: list[TokensSampled[V] | WeightsAdopted[V]]) -> None:
        while self._due and self._due[0][0] <= self.steps:
            _, entry, sequence = heapq.heappop(self._due)
            # It was aborted or lost its cache; outdated entries stay in the heap until they come up.
            if sequence.is_gone or entry != sequence.entry:
                continue
            parts = self._new_tokens(sequence)
            is_over = sequence.handed == sequence.length
            events.append(TokensSampled(sequence, self.at, parts, is_over))
            if is_over:
                self._release(sequence)
            else:
                self._schedule(sequence)

    def _new_tokens(self, sequence: EmulatedSequence) -> tuple[tuple[V, int], ...]:
        """Tokens that are not handed over yet, by version."""
        assert sequence.first_step is not None
        start = sequence.first_step + sequence.handed
        sequence.handed = self.steps - sequence.first_step
        # The version at the first new token, then each later one up to the current step.
        first = bisect_right(self._since, start) - 1
        ends = [*self._since[first + 1 :], self.steps]
        parts = []
        for version, end in zip(self._versions[first:], ends, strict=True):
            if end > start:
                parts.append((version, end - start))
                start = end
        return tuple(parts)


@dataclass(frozen=True)
class EmulatedClock:
    """A clock of emulated seconds since ``origin``, a time of the monotonic clock."""

    time_scale: float
    monotonic: Callable[[], float]
    origin: float

    def now(self) -> float:
        """Emulated seconds since the origin."""
        return (self.monotonic() - self.origin) * self.time_scale

    def wall_s_until(self, at: float) -> float:
        """Seconds of the wall clock until the emulated time ``at``."""
        return self.origin + at / self.time_scale - self.monotonic()


@dataclass(eq=False, slots=True)
class _Reply:
    """The deltas that a caller of ``generate`` receives, the reason of the last one, and the next token's id."""

    finish_reason: FinishReason
    next_id: int
    mailbox: "asyncio.Queue[TokenDelta | EngineError]" = field(default_factory=asyncio.Queue)


class EmulatedEngine:
    """An ``Engine`` without a model: requests wait in order of arrival while ``max_num_seqs`` completions are running.

    All tokens are the same, and so are their log-probabilities; the length trace says how many there are. Only a
    completion's first token tells the samples of a group apart: what follows their prompt is not shared by any two.
    """

    name = "emulated"

    @property
    def kv_tokens(self) -> int | None:
        """See ``Engine``."""
        return self._decode.kv_tokens

    def __init__(
        self,
        decode: DecodeSettings,
        lengths: LengthTraceSettings,
        time_scale: float,
        max_num_seqs: int,
        max_model_len: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        recomputes: bool = False,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self._recomputes = recomputes
        self._decode = decode
        self._lengths = lengths
        self._time_scale = time_scale
        self._max_model_len = max_model_len
        self._monotonic = monotonic
        self._replies: dict[EmulatedSequence, _Reply] = {}
        self._requested: dict[str, EmulatedSequence] = {}
        self._adopting: dict[PolicyVersion, list[asyncio.Future[None]]] = {}
        self._filler = array("i")
        self._logprobs = array("f")
        self._running: tuple[EmulatedBatch[PolicyVersion], EmulatedClock] | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    async def start(self) -> None:
        """Start emulated time."""
        clock = EmulatedClock(self._time_scale, self._monotonic, self._monotonic())
        batch = EmulatedBatch(DecodeCurve(self._decode), self.max_num_seqs, _UNPUBLISHED, recomputes=self._recomputes)
        self._running = batch, clock

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Wait as long as sampling this completion would take. Closing the iterator early frees its slot.

        Raises:
            EngineError: the engine is closed.
            PromptRefused: the prompt does not fit ``max_model_len``, or the request has a JSON schema.
            DataError: the length trace has no length for the prompt.
        """
        batch, clock = self._started()
        refuse_schema(request, self.name)
        length, reason = self._length(request)
        group = request.request_id.rpartition("/")[0]
        handed = len(request.prefix_token_ids)
        if handed >= length:
            yield self._delta(batch.version, 0, reason, FILLER_ID)
            return
        sequence = EmulatedSequence(len(request.prompt_token_ids), length, handed=handed, group=group)
        index = request.request_id.rpartition("/")[2]
        reply = _Reply(reason, FILLER_ID + int(index) if index.isdecimal() and not handed else FILLER_ID)
        self._replies[sequence] = reply
        self._requested[request.request_id] = sequence
        # Not advanced at once: a whole group arrives in one turn of the event loop and is admitted at one boundary.
        batch.arrive(sequence, clock.now())
        self._wake_at(None)
        try:
            # ``_hand_over`` removes the reply with its last delta, which may still be in the mailbox then.
            while sequence in self._replies or not reply.mailbox.empty():
                delta = await reply.mailbox.get()
                if isinstance(delta, EngineError):
                    raise delta
                yield delta
        finally:
            if self._requested.get(request.request_id) is sequence:
                del self._requested[request.request_id]
            # If it is still registered, the reader left before the last delta, so the slot is not free yet.
            if self._replies.pop(sequence, None) is not None and self._running is not None:
                batch.abort(sequence, clock.now())
                self._wake_at(None)

    def interrupt(self, request_id: str) -> bool:
        """See ``Engine``."""
        sequence = self._requested.get(request_id)
        if sequence is None or self._running is None:
            return False
        batch, clock = self._running
        batch.interrupt(sequence, clock.now())
        self._wake_at(None)
        return True

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """See ``Engine``. It takes ``adopt_s``, plus the prefill of all caches if those are recomputed.

        Raises:
            WeightsError: the directory has no weights.
            EngineError: the engine is closed.
        """
        if not await in_thread(_has_weights, directory):
            raise WeightsError(f"expected a .safetensors file for {version} in {directory}, got none")
        batch, clock = self._started()
        adopted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adopting.setdefault(version, []).append(adopted)
        batch.adopt(version, clock.now())
        self._wake_at(None)
        await adopted

    async def close(self) -> None:
        """Stop, and fail all running requests; idempotent."""
        self._end("expected the emulated engine to run on, but it was closed; repeat the request elsewhere")

    def _started(self) -> tuple[EmulatedBatch[PolicyVersion], EmulatedClock]:
        if self._running is None:
            raise EngineError("expected a running emulated engine, got one that has not started or has ended")
        return self._running

    def _length(self, request: GenerationRequest) -> tuple[int, FinishReason]:
        prompt_tokens, limit = len(request.prompt_token_ids), request.sampling.max_completion_length
        context = self._max_model_len or sys.maxsize
        refuse_unfit(request.prompt_token_ids, context - 1)
        limit = min(limit, context - prompt_tokens)
        # The trace has lengths by sample, and a request's id is its trajectory's.
        group_id, _, index = request.request_id.rpartition("/")
        length = trace_length(self._lengths, group_id, int(index) if index.isdecimal() else 0, request.prompt)
        return (length, FinishReason.STOP) if length <= limit else (limit, FinishReason.LENGTH)

    def _wake_at(self, at: float | None) -> None:
        """Advance at an emulated time; None: after all callbacks of this turn of the event loop."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if at is None:
            self._timer = loop.call_soon(self._advance)
        else:
            _, clock = self._started()
            # Not earlier: a timer that fires early would not reach the boundary, and would be set again and again.
            self._timer = loop.call_later(max(SHORTEST_SLEEP_S, clock.wall_s_until(at)), self._advance)

    def _advance(self) -> None:
        self._timer = None
        if self._running is None:
            return
        batch, clock = self._running
        try:
            for event in batch.advance(clock.now()):
                if isinstance(event, WeightsAdopted):
                    self._settle(event)
                else:
                    self._hand_over(event)
        except Exception as error:
            log.exception("emulation failed", running=len(self._replies))
            self._end(f"expected decode steps, got {type(error).__name__}: {error}")
            return
        if (wake := batch.next_wake()) is not None:
            self._wake_at(wake)

    def _settle(self, adopted: WeightsAdopted[PolicyVersion]) -> None:
        for waiting in self._adopting.pop(adopted.version, []):
            # It is done already if its caller was cancelled; setting a result would raise InvalidStateError.
            if not waiting.done():
                waiting.set_result(None)

    def _hand_over(self, sampled: TokensSampled[PolicyVersion]) -> None:
        reply = self._replies.get(sampled.sequence)
        if reply is None:
            return
        for number, (version, tokens) in enumerate(sampled.parts, start=1):
            is_last = sampled.is_over and number == len(sampled.parts)
            reason = reply.finish_reason if is_last else None
            reply.mailbox.put_nowait(self._delta(version, tokens, reason, reply.next_id))
            reply.next_id = FILLER_ID
        if sampled.is_interrupted:
            reply.mailbox.put_nowait(Interrupted("expected a complete completion, but it was interrupted"))
        if sampled.is_over or sampled.is_interrupted:
            del self._replies[sampled.sequence]

    def _delta(self, version: PolicyVersion, tokens: int, reason: FinishReason | None, first_id: int) -> TokenDelta:
        # Slices of one array, so that a delta costs no loop over its tokens.
        if len(self._filler) < tokens:
            self._filler = array("i", [FILLER_ID]) * (2 * tokens)
            self._logprobs = array("f", [FILLER_LOGPROB]) * (2 * tokens)
        token_ids = self._filler[:tokens]
        if tokens:
            token_ids[0] = first_id
        return TokenDelta(token_ids, self._logprobs[:tokens], version, reason)

    def _end(self, message: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._running = self._timer = None
        for reply in self._replies.values():
            reply.mailbox.put_nowait(EngineError(message))
        self._replies.clear()
        for waiting in (one for several in self._adopting.values() for one in several):
            if not waiting.done():
                waiting.set_exception(EngineError(message))
        self._adopting.clear()


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


class FillerTokenizer:
    """A ``Tokenizer`` that only counts: a prompt has a token for every ``characters_per_token`` characters."""

    def __init__(self, characters_per_token: float) -> None:
        self._characters_per_token = characters_per_token

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """As many ids as the prompt would have tokens, at least one; the first one tells prompts apart."""
        return [zlib.crc32(prompt.text.encode()) % PROMPT_IDS, *self._filler(prompt.text)[1:]]

    def _filler(self, text: str) -> list[int]:
        return [FILLER_ID] * max(1, math.ceil(len(text) / self._characters_per_token))

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        """``decode``: no token is special."""
        return self.decode

    def decode(self, token_ids: Sequence[int]) -> str:
        """A short text with the number of tokens."""
        return f"({len(token_ids)} emulated tokens)"


class FillerChat(FillerTokenizer):
    """A ``FillerTokenizer`` for conversations. A completion's text has a letter a token, so that it can be streamed."""

    has_chat_template = True
    reads_tools = False

    def encode_text(self, text: str) -> list[int]:
        """As many filler ids as the text would have tokens."""
        return self._filler(text)

    def encode_more(self, text: str) -> list[int]:
        """As many filler ids as the text would have tokens."""
        return self.encode_text(text)

    def encode_chat(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """As many filler ids as all turns together would have tokens."""
        return self.encode_text("\n".join(str(turn["content"]) for turn in turns))

    def decode(self, token_ids: Sequence[int]) -> str:
        """A text with one letter for each token."""
        return "x" * len(token_ids)

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Like ``decode``: no token is special."""
        return self.decode(token_ids)

    def is_special(self, token_id: int) -> bool:
        """False: no token is special."""
        return False


class ConstantRewards:
    """Gives every completion the same reward under each of the names, at once and in this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    async def start(self) -> None:
        """Do nothing."""

    async def score(self, request: ScoreRequest) -> Scores:
        """The constant reward, under each name."""
        return Scores(dict.fromkeys(self.names, REWARD), {})

    async def close(self) -> None:
        """Do nothing."""
