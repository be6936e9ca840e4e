"""The engine port over a timeline: real waiting, in place of a model. Knows no tensors and needs no thread.

Emulated time runs ``time_scale`` times as fast as the wall clock, from the start of the engine on. The timeline is
never told when the event loop really woke up: a late wake-up hands over late, and the steps after it are on time again.
Invariants: a_late_wake_up_delays_no_later_step; closing_the_iterator_frees_the_slot; every_delta_is_of_one_version.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from producers.generation.engines.emulated.lengths import trace_length
from producers.generation.engines.emulated.settings import LengthTraceSettings
from producers.generation.engines.emulated.timeline import Adopted, Grown, Sequence, Timeline
from schemas.errors import EngineError, WeightsError
from schemas.identifiers import PolicyVersion
from schemas.messages.trajectories import FinishReason
from schemas.ports.engine import GenerationRequest, TokenDelta
from schemas.profiles.decode import DecodeCurve, DecodeSettings

log = structlog.get_logger()

FILLER_ID = 1
FILLER_LOGPROB = -1.0
SHORTEST_SLEEP_S = 0.0005
"""Timers of the event loop may ring up to this much early."""
_UNPUBLISHED = PolicyVersion(0, 0)


@dataclass(frozen=True)
class EmulatedClock:
    """Emulated seconds since ``origin`` of the monotonic clock."""

    time_scale: float
    monotonic: Callable[[], float]
    origin: float

    def now(self) -> float:
        """Emulated seconds."""
        return (self.monotonic() - self.origin) * self.time_scale

    def wall_s_until(self, at: float) -> float:
        """Seconds of the wall clock until an emulated moment."""
        return self.origin + at / self.time_scale - self.monotonic()


@dataclass(eq=False, slots=True)
class _Reply:
    """What a caller of ``generate`` waits for."""

    finish_reason: FinishReason
    mailbox: "asyncio.Queue[TokenDelta | EngineError]" = field(default_factory=asyncio.Queue)


class EmulatedEngine:
    """An ``Engine``: requests wait in order of arrival once ``max_num_seqs`` completions are running.

    Tokens are all alike, and so are their log-probabilities; their number comes from the length trace.
    """

    name = "emulated"

    def __init__(
        self,
        decode: DecodeSettings,
        lengths: LengthTraceSettings,
        time_scale: float,
        max_num_seqs: int,
        max_model_len: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self._decode = decode
        self._lengths = lengths
        self._time_scale = time_scale
        self._max_model_len = max_model_len
        self._monotonic = monotonic
        self._replies: dict[Sequence, _Reply] = {}
        self._adopting: dict[PolicyVersion, list[asyncio.Future[None]]] = {}
        self._filler = array("i")
        self._logprobs = array("f")
        self._running: tuple[Timeline[PolicyVersion], EmulatedClock] | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    async def start(self) -> None:
        """Begin emulated time."""
        clock = EmulatedClock(self._time_scale, self._monotonic, self._monotonic())
        self._running = Timeline(DecodeCurve(self._decode), self.max_num_seqs, _UNPUBLISHED), clock

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Wait as long as sampling this completion would take. Closing the iterator early frees its slot.

        Raises:
            EngineError: the engine is closed, or the prompt does not fit ``max_model_len``.
            DataError: the length trace has no length for it.
        """
        timeline, clock = self._started()
        length, reason = self._length(request)
        sequence, reply = Sequence(len(request.prompt_token_ids), length), _Reply(reason)
        self._replies[sequence] = reply
        timeline.arrive(sequence, clock.now())
        self._wake_at(None)
        try:
            while sequence in self._replies or not reply.mailbox.empty():
                delta = await reply.mailbox.get()
                if isinstance(delta, EngineError):
                    raise delta
                yield delta
        finally:
            if self._replies.pop(sequence, None) is not None and self._running is not None:
                timeline.drop(sequence, clock.now())
                self._wake_at(None)

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """Take new weights between two decode steps; running completions go on.

        Raises:
            WeightsError: there are none in the directory.
            EngineError: the engine is closed.
        """
        if not await asyncio.to_thread(_has_weights, directory):
            raise WeightsError(f"expected a .safetensors file for {version} in {directory}, got none")
        timeline, clock = self._started()
        adopted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adopting.setdefault(version, []).append(adopted)
        timeline.adopt(version, clock.now())
        self._wake_at(None)
        await adopted

    async def close(self) -> None:
        """Stop, and fail whatever was running; idempotent."""
        self._end("expected the emulated engine to run on, but it was closed; repeat the request elsewhere")

    def _started(self) -> tuple[Timeline[PolicyVersion], EmulatedClock]:
        if self._running is None:
            raise EngineError("expected a running emulated engine, got one that is not started or has ended")
        return self._running

    def _length(self, request: GenerationRequest) -> tuple[int, FinishReason]:
        prompt_tokens, limit = len(request.prompt_token_ids), request.sampling.max_completion_length
        if self._max_model_len is not None:
            limit = min(limit, self._max_model_len - prompt_tokens)
        if not prompt_tokens or limit < 1:
            raise EngineError(
                f"expected a prompt of at least 1 token, and fewer than generation.max_model_len, "
                f"got {prompt_tokens} in request {request.request_id}; lower loop.max_prompt_length"
            )
        group_id, _, index = request.request_id.rpartition("/")
        length = trace_length(self._lengths, group_id, int(index) if index.isdecimal() else 0, request.prompt)
        return (length, FinishReason.STOP) if length <= limit else (limit, FinishReason.LENGTH)

    def _wake_at(self, at: float | None) -> None:
        """Turn at an emulated moment, or as soon as everybody has spoken who speaks in this turn of the loop."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if at is None:
            self._timer = loop.call_soon(self._turn)
        else:
            _, clock = self._started()
            self._timer = loop.call_later(max(SHORTEST_SLEEP_S, clock.wall_s_until(at)), self._turn)

    def _turn(self) -> None:
        self._timer = None
        if self._running is None:
            return
        timeline, clock = self._running
        try:
            for event in timeline.advance(clock.now()):
                if isinstance(event, Adopted):
                    self._settle(event)
                else:
                    self._hand_over(event)
        except Exception as error:
            log.exception("emulation failed", running=len(self._replies))
            self._end(f"expected decode steps, got {type(error).__name__}: {error}")
            return
        if (wake := timeline.next_wake()) is not None:
            self._wake_at(wake)

    def _settle(self, adopted: Adopted[PolicyVersion]) -> None:
        for waiting in self._adopting.pop(adopted.version, []):
            if not waiting.done():
                waiting.set_result(None)

    def _hand_over(self, grown: Grown[PolicyVersion]) -> None:
        reply = self._replies.get(grown.sequence)
        if reply is None:
            return
        for number, (version, tokens) in enumerate(grown.parts, start=1):
            is_last = grown.is_over and number == len(grown.parts)
            reply.mailbox.put_nowait(self._delta(version, tokens, reply.finish_reason if is_last else None))
        if grown.is_over:
            del self._replies[grown.sequence]

    def _delta(self, version: PolicyVersion, tokens: int, reason: FinishReason | None) -> TokenDelta:
        if len(self._filler) < tokens:
            self._filler = array("i", [FILLER_ID]) * (2 * tokens)
            self._logprobs = array("f", [FILLER_LOGPROB]) * (2 * tokens)
        return TokenDelta(self._filler[:tokens], self._logprobs[:tokens], version, reason)

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
