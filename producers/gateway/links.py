"""The gateway's connections to workers, and the queue in front of them. Sequences go in, tokens come out; no HTTP.

The gateway finds workers by their heartbeats. From then on the connection itself shows whether a worker is alive, so
requests continue during an outage of the broker.

Invariants, each with a test of its name:
- a_sequence_ends_once: its sink gets the last token or one error, and nothing after that;
- requests_beyond_the_queue_are_refused: the queue has a bound, and no request waits longer than its time-out;
- a_lost_worker_loses_no_request: another worker continues the request after the last token that was received.
"""

import asyncio
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import aiohttp
import numpy as np
import structlog
from aiohttp import WSMsgType
from pydantic import ValidationError

from streamrl.bus.waiting import wait_for_tasks
from streamrl.producers.gateway.balancing import (
    KNOWN_SESSIONS,
    CachedPrefixes,
    WorkerView,
    choose,
    prefix_blocks,
    tokens_left,
)
from streamrl.producers.gateway.formats import AnswerFormat
from streamrl.producers.gateway.refusals import ApiError, failed, invalid, too_many, unavailable
from streamrl.producers.gateway.worker_requests import (
    MAX_FRAME_BYTES,
    PING_S,
    SampledTokens,
    WorkerCard,
    pack,
    sampled_of,
    unpack,
    verify_peer,
)
from streamrl.schemas.reports import Heartbeat, WorkerState
from streamrl.schemas.trajectories import LengthEstimate, SamplingParams

log = structlog.get_logger()

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0
QUEUE_TIMEOUT_S = 10.0
"""Longest wait for a slot in seconds: after it the request gets status 429 with Retry-After, and may go elsewhere."""
FORGET_S = 60.0
"""Seconds without connection and heartbeat after which the gateway stops trying to reach a worker."""
SWEEP_S = 0.1
"""Seconds between two checks of the queue for sequences that have waited too long."""
MAX_ATTEMPTS = 3
"""Workers' failures at a sequence after which it ends with an error."""
RATE_WINDOW_S = 10.0
"""Seconds over which the rate of sampled tokens is measured."""


@dataclass(frozen=True, eq=False)
class SequenceRequest:
    """A request to a worker: one completion of a prompt. ``session``: name that calls of one conversation share.

    ``stream_as``: name of its tokens on the tokens topic; empty: they are not published. ``format``: the format forced
    on it; no worker can continue a completion with a format after its first token. ``traceparent``: its request's span,
    if that is traced.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    estimate: LengthEstimate
    session: str | None = None
    stream_as: str = ""
    format: AnswerFormat | None = None
    traceparent: str = ""

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Hashes of its prompt's blocks, for looking it up in workers' caches."""
        return prefix_blocks(self.prompt_token_ids)

    def as_frame(self, prefix: "array[int]") -> dict[str, Any]:
        """The request as a frame's content; ``prefix``: tokens that other workers have sampled."""
        return {
            "prompt": np.array(self.prompt_token_ids, "<i4").tobytes(),
            "prefix": prefix.tobytes(),
            "sampling": self.sampling.model_dump(),
            "stream_as": self.stream_as,
            "traceparent": self.traceparent,
            "json_schema": self.format.json_schema if self.format is not None else "",
        }


@dataclass(eq=False)
class ServedSequence:
    """One completion, from the queue to its last token. ``sink`` receives its tokens, or the error that ends it.

    ``tried``: workers that failed at it; ``attempts``: number of those failures. ``sampled``: its tokens so far;
    ``parts``: the workers that sampled it, each with its first token's index. ``name``: its number on its connection.
    """

    request: SequenceRequest
    sink: Callable[["SampledTokens | ApiError"], None]
    sampled: "array[int]" = field(init=False, default_factory=lambda: array("i"))
    parts: list[tuple[str, int]] = field(init=False, default_factory=list)
    tried: set[str] = field(init=False, default_factory=set)
    attempts: int = field(init=False, default=0)
    deadline: float = field(init=False, default=0.0)
    link: "WorkerLink | None" = field(init=False, default=None)
    name: int = field(init=False, default=0)
    is_over: bool = field(init=False, default=False)

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.sampled)

    @property
    def left(self) -> float:
        """Predicted tokens that it has left to sample."""
        limit, estimate = self.request.sampling.max_completion_length, self.request.estimate
        return tokens_left(min(limit, estimate.median), min(limit, estimate.upper), self.generated)


@dataclass
class WorkerLink:
    """The connection to one worker at one address, renewed when it breaks until the worker is gone."""

    worker_id: str
    address: str
    pool: "WorkerPool"
    heard_at: float = 0.0
    card: WorkerCard | None = field(init=False, default=None)
    cached: CachedPrefixes = field(init=False, default_factory=CachedPrefixes)
    is_gone: bool = field(init=False, default=False)
    running: dict[int, ServedSequence] = field(init=False, default_factory=dict)
    _outgoing: list[bytes] = field(init=False, default_factory=list)
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _last_name: int = field(init=False, default=0)

    @property
    def takes_requests(self) -> bool:
        """Whether the worker accepts sequences."""
        return self.card is not None and self.card.takes_requests and not self.is_gone

    def view(self) -> WorkerView:
        """The worker as ``choose`` sees it; only for a worker that takes requests."""
        assert self.card is not None, "the worker is connected"
        left = sum(sequence.left for sequence in self.running.values())
        return WorkerView(self.worker_id, self.card.slots, len(self.running), left, self.card.version, self.cached)

    def start(self, sequence: ServedSequence) -> None:
        """Send a sequence to the worker."""
        assert self.card is not None, "the worker is connected"
        self._last_name += 1
        sequence.link, sequence.name = self, self._last_name
        self.running[sequence.name] = sequence
        self.cached.add_blocks(sequence.request.blocks, self.card.version)
        if sequence.parts and sequence.parts[-1][1] == sequence.generated:
            sequence.parts.pop()  # the previous worker sampled nothing of it
        sequence.parts.append((self.worker_id, sequence.generated))
        self._send(pack("start", sequence.name, sequence.request.as_frame(sequence.sampled)))

    def cancel(self, sequence: ServedSequence) -> None:
        """Tell the worker to drop a sequence that is no longer wanted."""
        if self.running.pop(sequence.name, None) is not None:
            self._send(pack("cancel", sequence.name))

    def _send(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        self._wake.set()

    async def follow(self) -> None:
        """Connect, and hand the worker's tokens to their sequences, until the worker is gone."""
        pause = FIRST_RETRY_S
        async with aiohttp.ClientSession() as session:
            while not self.is_gone and self.pool.clock() - self.heard_at < FORGET_S:
                try:
                    async with session.ws_connect(
                        self.address, heartbeat=PING_S, max_msg_size=MAX_FRAME_BYTES, compress=0
                    ) as socket:
                        if await verify_peer(socket, self.pool.secret, is_worker=False):
                            log.info("connected to a worker", worker=self.worker_id)
                            pause = FIRST_RETRY_S
                            await self._converse(socket)
                        else:
                            log.error(
                                "a worker and this gateway have different secrets; set the same "
                                "generation.request_secret for all processes of the run",
                                worker=self.worker_id,
                            )
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    log.debug("worker not reached", worker=self.worker_id, error=str(error))
                await asyncio.sleep(pause)
                pause = min(LONGEST_RETRY_S, 2 * pause)
        self.is_gone = True

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        sending = asyncio.create_task(self._send_loop(socket))
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                self._receive(message.data)
        except (ValueError, ValidationError) as error:
            log.error("a worker's frame was not understood", worker=self.worker_id, error=str(error)[:200])
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            self._lost()

    async def _send_loop(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        with suppress(ConnectionError, aiohttp.ClientError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                frames, self._outgoing = self._outgoing, []
                for frame in frames:
                    await socket.send_bytes(frame)

    def _receive(self, data: bytes) -> None:
        self.heard_at = self.pool.clock()
        match unpack(data):
            case ["tokens", list(rows)]:
                for sampled in sampled_of(rows):
                    self._sampled(sampled)
            case ["status", dict(fields)]:
                self.card = WorkerCard.model_validate(fields)
                self.pool.send_queued()
            case ["failed", int(name), str(kind), str(why)]:
                self._failed(name, kind, why)

    def _sampled(self, sampled: SampledTokens) -> None:
        sequence = self.running.get(sampled.name)
        if sequence is None:  # it was cancelled
            return
        sequence.sampled.extend(sampled.token_ids)
        self.pool.sampled(len(sampled.token_ids))
        if sampled.finish_reason is not None:
            del self.running[sampled.name]
            sequence.is_over = True
        sequence.sink(sampled)
        if sequence.is_over:
            self.pool.send_queued()

    def _failed(self, name: int, kind: str, why: str) -> None:
        sequence = self.running.pop(name, None)
        if sequence is None:
            return
        if kind == "refused":
            # The prompt's length was checked before, so the worker refuses the schema, if there is one.
            form = sequence.request.format
            self.pool.end(sequence, invalid("prompt" if form is None else form.param, why))
        elif kind == "busy":
            self.pool.again(sequence, self.worker_id, too_many(f"{why}; ask again later", 1.0, "overloaded"))
        else:
            self.pool.again(sequence, self.worker_id, failed(why))
        self.pool.send_queued()

    def _lost(self) -> None:
        """Hand this worker's sequences back to the pool after the connection broke."""
        self.card, self._outgoing = None, []
        left, self.running = self.running, {}
        if left:
            log.warning("a worker was lost with requests", worker=self.worker_id, requests=len(left))
        lost = failed(f"worker {self.worker_id} was lost while it sampled this; ask again")
        for sequence in left.values():
            self.pool.again(sequence, self.worker_id, lost)
        self.pool.send_queued()


@dataclass
class WorkerPool:
    """The links to all workers, and the queue of sequences that wait for a slot.

    ``queue_timeout_s``: longest wait of a sequence; ``max_queued``: most sequences that may wait.
    """

    secret: str
    max_queued: int
    queue_timeout_s: float = QUEUE_TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    links: dict[str, WorkerLink] = field(init=False, default_factory=dict)
    lost: int = field(init=False, default=0)
    queued: deque[ServedSequence] = field(init=False, default_factory=deque)
    generated_tokens: int = field(init=False, default=0)
    _following: "dict[str, asyncio.Task[None]]" = field(init=False, default_factory=dict)
    _sessions: "OrderedDict[str, str]" = field(init=False, default_factory=OrderedDict)
    _rates: deque[tuple[float, int]] = field(init=False, default_factory=deque)

    @property
    def running(self) -> int:
        """Number of sequences that workers are sampling."""
        return sum(len(link.running) for link in self.links.values())

    @property
    def ready(self) -> list[WorkerLink]:
        """Links to workers that take requests."""
        return [link for link in self.links.values() if link.takes_requests]

    def heard(self, heartbeat: Heartbeat) -> None:
        """Read a worker's heartbeat, and connect to the worker if it is new or has a new address."""
        known = self.links.get(heartbeat.worker_id)
        if known is not None and known.address == heartbeat.request_address and not known.is_gone:
            known.heard_at = self.clock()
            known.is_gone = heartbeat.state is WorkerState.STOPPED
            return
        if heartbeat.request_address is None or heartbeat.state is WorkerState.STOPPED:
            return
        if known is not None:
            known.is_gone = True
            self._following[heartbeat.worker_id].cancel()
        link = WorkerLink(heartbeat.worker_id, heartbeat.request_address, self, self.clock())
        self.links[heartbeat.worker_id] = link
        self._following[heartbeat.worker_id] = asyncio.create_task(link.follow())

    async def close(self) -> None:
        """End all connections."""
        tasks = [*self._following.values()]
        for task in tasks:
            task.cancel()
        await wait_for_tasks(tasks)

    def refuse_overload(self, sequences: int = 1) -> None:
        """Refuse a request if neither the slots nor the queue have room for its ``sequences``.

        Raises:
            ApiError: 429 if there is no room, 503 if there is no worker.
        """
        ready = self.ready
        if not ready:
            raise unavailable("expected a worker that takes requests, got none that is ready; ask again later")
        free = sum(max(0, link.card.slots - len(link.running)) for link in ready if link.card is not None)
        if len(self.queued) + sequences > self.max_queued + free:
            raise too_many(
                f"expected room for {sequences} completions, got {len(self.queued)} already waiting; ask again later",
                self.wait_s(),
                "overloaded",
            )

    def wait_s(self) -> float:
        """Predicted seconds until all waiting sequences are running, from 1 to 60."""
        work = sum(sequence.left for sequence in self.queued)
        while len(self._rates) > 2 and self._rates[0][0] < self.clock() - RATE_WINDOW_S:
            self._rates.popleft()
        if len(self._rates) < 2 or (elapsed := self.clock() - self._rates[0][0]) <= 0:
            return 1.0
        rate = (self.generated_tokens - self._rates[0][1]) / elapsed
        return min(60.0, max(1.0, work / rate if rate else 60.0))

    def submit(self, sequences: Sequence[ServedSequence]) -> None:
        """Queue sequences, which are sampled as soon as there are slots.

        Raises:
            ApiError: there is no room for them.
        """
        self.refuse_overload(len(sequences))
        for sequence in sequences:
            sequence.deadline = self.clock() + self.queue_timeout_s
            self.queued.append(sequence)
        self.send_queued()

    def withdraw(self, sequence: ServedSequence) -> None:
        """Cancel a sequence that is no longer wanted."""
        if sequence.is_over:
            return
        sequence.is_over = True
        if sequence.link is not None:
            sequence.link.cancel(sequence)
        else:
            with suppress(ValueError):
                self.queued.remove(sequence)
        self.send_queued()

    def send_queued(self) -> None:
        """Send waiting sequences to workers with free slots."""
        while self.queued:
            sequence = self.queued[0]
            request, session = sequence.request, sequence.request.session
            ready = self.ready
            # Workers that failed at it get it again only if there are no others.
            fresh = [link for link in ready if link.worker_id not in sequence.tried]
            views = [link.view() for link in fresh or ready]
            last = self._sessions.get(session) if session else None
            worker_id = choose(views, len(request.prompt_token_ids), request.blocks, last)
            if worker_id is None:
                return
            self.queued.popleft()
            if session:
                self._sessions[session] = worker_id
                self._sessions.move_to_end(session)
                if len(self._sessions) > KNOWN_SESSIONS:
                    self._sessions.popitem(last=False)
            self.links[worker_id].start(sequence)

    def sampled(self, tokens: int) -> None:
        """Count ``tokens`` that workers sampled."""
        self.generated_tokens += tokens
        now = self.clock()
        if not self._rates or now - self._rates[-1][0] > 0.25:
            self._rates.append((now, self.generated_tokens))

    def again(self, sequence: ServedSequence, worker_id: str, error: ApiError) -> None:
        """Queue a sequence again after a worker failed at it, for another worker or the same.

        It ends with ``error`` after ``MAX_ATTEMPTS`` failures, or at once if it has a format and its first token.
        """
        sequence.link = None
        sequence.tried.add(worker_id)
        sequence.attempts += 1
        if sequence.attempts >= MAX_ATTEMPTS or (sequence.request.format is not None and sequence.generated):
            self.lost += 1
            self.end(sequence, error)
        else:
            # It goes to the front of the queue, since it has waited already.
            sequence.deadline = self.clock() + self.queue_timeout_s
            self.queued.appendleft(sequence)

    def end(self, sequence: ServedSequence, error: ApiError) -> None:
        """End a sequence with an error, which its sink receives."""
        if not sequence.is_over:
            sequence.is_over = True
            sequence.sink(error)

    async def sweep_loop(self) -> None:
        """Refuse sequences that have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            while self.queued and self.queued[0].deadline < self.clock():
                late = f"expected a free slot within {self.queue_timeout_s:g} s, got none; ask again later"
                error = too_many(late, self.wait_s(), "overloaded") if self.ready else unavailable(late)
                self.end(self.queued.popleft(), error)
