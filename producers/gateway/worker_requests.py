"""A worker's side work for gateways: their requests, sampled in its batch together with its orders.

Knows no topic and no HTTP interface.

Each gateway holds one WebSocket, over which all of its requests go and all tokens come back, one frame a decode step.
Frames are msgpack arrays whose first entry is their kind:

    gateway → worker    start, name, request    cancel, name
    worker → gateway    status, card            tokens, [[name, ids, log-probs, lineage, number, reason], ...]
                        failed, name, kind, why

Invariants, each with a test of its name:
- only_who_knows_the_secret_is_answered: both sides prove it over the other's nonce, and it never travels;
- requests_keep_to_their_slots: so many run at once, whatever is asked, and the others are the orders';
- a_gateway_that_leaves_frees_its_slots;
- a_slow_gateway_stalls_nothing: what it does not read is held up to a bound, then it is disconnected.
"""

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
import numpy as np
import structlog
from aiohttp import ClientConnectionError, ClientWebSocketResponse, WSMsgType, web
from pydantic import Field, ValidationError

from streamrl.bus.serving import listen
from streamrl.bus.waiting import end_tasks
from streamrl.producers.generation.engines.port import Engine, GenerationRequest, TokenDelta
from streamrl.producers.generation.rollout import TokenStream, WorkerLoad, closed_early
from streamrl.producers.generation.side_work import HostWorker
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.errors import EngineError, PromptRefused, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Part, SamplingParams, ShortText

log = structlog.get_logger()

PATH = "/requests"
MAX_FRAME_BYTES = 16 << 20
"""A prompt of four million tokens; what a decode step says of thousands of requests is far less."""
MAX_HELD_DELTAS = 1 << 16
"""Deltas that a gateway has not taken yet: seconds of a large batch. One so far behind does not come back."""
WAITING_PER_SLOT = 4
"""Requests that may wait in a worker for each slot: a gateway sends as many as there are slots, and there are few."""
HANDSHAKE_S = 5.0
PING_S = 5.0
STATUS_S = 1.0
_NONCE_BYTES = 32

WebSocket = web.WebSocketResponse | ClientWebSocketResponse


class SampleRequest(Part):
    """``prompt``: token ids as little-endian int32; ``prefix``: of the completion's beginning, which another worker has
    sampled; ``chunk_tokens``: of one delta; ``stream_as``: under which name its tokens go to the tokens topic, if the
    worker streams them; none: they do not. ``json_schema`` and ``traceparent``: see ``GenerationRequest``.
    """

    prompt: Annotated[bytes, Field(max_length=MAX_FRAME_BYTES)]
    prefix: Annotated[bytes, Field(max_length=MAX_FRAME_BYTES)] = b""
    sampling: SamplingParams
    json_schema: Annotated[str, Field(max_length=MAX_FRAME_BYTES)] = ""
    chunk_tokens: Annotated[int, Field(ge=1)] = 1
    stream_as: ShortText = ""
    traceparent: ShortText = ""


class WorkerCard(Part):
    """What a gateway knows of a worker: whether it takes requests, its slots for them, and what it does now.

    ``tokens_per_s``: of orders and requests together.
    """

    worker_id: ShortText
    slots: Annotated[int, Field(ge=1)]
    takes_requests: bool
    version: PolicyVersion
    running: Annotated[int, Field(ge=0)]


FailureKind = Literal["refused", "busy", "failed"]
"""The request will never be sampled; not now and not here; the engine failed, and another may do it."""


class SampledTokens(NamedTuple):
    """Of one request, as it stands in a frame."""

    name: int
    token_ids: list[int]
    logprobs: list[float]
    version: PolicyVersion
    finish_reason: str | None


def pack(*frame: Any) -> bytes:
    """A frame's bytes."""
    packed: bytes = msgpack.packb(frame)
    return packed


def unpack(data: bytes) -> list[Any]:
    """A frame.

    Raises:
        ValueError: it is none.
    """
    try:
        frame = msgpack.unpackb(data, use_list=True)
    except Exception as error:  # of several kinds, some of which are no ValueError
        raise ValueError(f"expected a msgpack frame, got {type(error).__name__}") from error
    if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
        raise ValueError("expected a frame that begins with its kind")
    return frame


def sampled_of(rows: list[Any]) -> list[SampledTokens]:
    """What a frame of tokens says."""
    return [
        SampledTokens(name, ids, logprobs, PolicyVersion(lineage, number), reason)
        for name, ids, logprobs, lineage, number, reason in rows
    ]


async def prove(socket: WebSocket, secret: str, *, is_worker: bool) -> bool:
    """Whether the other side knows the secret too; ours is proved to it first only where it is a worker's.

    Each sends a nonce, and HMAC-SHA-256 over its own role and both of them: a proof serves for one connection and for
    one side of it.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    await socket.send_bytes(own)
    try:
        theirs = await socket.receive_bytes(timeout=HANDSHAKE_S)
        if len(theirs) != _NONCE_BYTES:
            return False
        nonces = own + theirs if is_worker else theirs + own
        await socket.send_bytes(_proof(secret, nonces, is_worker=is_worker))
        found = await socket.receive_bytes(timeout=HANDSHAKE_S)
    except (TimeoutError, TypeError, ClientConnectionError):  # TypeError: it closed, or sent text
        return False
    return hmac.compare_digest(found, _proof(secret, nonces, is_worker=not is_worker))


def _proof(secret: str, nonces: bytes, *, is_worker: bool) -> bytes:
    role = b"worker" if is_worker else b"gateway"
    return hmac.digest(secret.encode(), role + nonces, "sha256")


def shared_secret(path: Path) -> str:
    """What gateways and workers of one run directory know; made by the process that comes first.

    Raises:
        UserError: the file can be neither read nor made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole before it has its name: two processes that come at once end up with one and the same.
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        with suppress(FileExistsError):
            os.link(new, path)
        new.unlink()
        return path.read_text().strip()
    except OSError as error:
        raise UserError(
            f"expected a file for the secret of gateways and workers at {path}, got: {error.strerror}; make it "
            "readable, or give all processes of the run one generation.request_secret"
        ) from error


@dataclass(frozen=True)
class RequestSlots:
    """So many of the engine's slots are for gateways, which find the worker at ``host`` and know ``secret``."""

    host: str
    slots: int
    secret: str

    @property
    def reserved_slots(self) -> int:
        """See ``SideWorkFactory``."""
        return self.slots

    def build(self, host: HostWorker) -> "RequestServer":
        """See ``SideWorkFactory``."""
        orders = host.rollout
        return RequestServer(orders.engine, orders.load, host.worker_id, self, host.status, orders.tokens)


@dataclass
class RequestServer:
    """Listens for gateways. ``running`` counts requests in the engine, ``waiting`` those that wait for a slot.

    ``load`` is the orders' too: heartbeats count the tokens of both. ``tokens``: the stream that also gets tokens of
    requesters who agreed; None: there is none.
    """

    engine: Engine
    load: WorkerLoad
    worker_id: str
    settings: RequestSlots
    status: WorkerStatus
    tokens: TokenStream | None = None
    running: int = field(init=False, default=0)
    waiting: int = field(init=False, default=0)
    holds_up_leaving: bool = field(init=False, default=True)
    _places: asyncio.Semaphore = field(init=False)
    _idle: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _runner: web.AppRunner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.settings.slots)
        self._idle.set()

    async def subscribe(self) -> None:
        """Reads no topic."""

    async def begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Listen, and have heartbeats say where. There is no loop: each connection has its own.

        Raises:
            UserError: the host is not this machine's.
        """
        self.status.take_requests_at(await self.open())
        return []

    async def open(self) -> str:
        """Listen on a free port; the address.

        Raises:
            UserError: the host is not this machine's.
        """
        app = web.Application(client_max_size=1024)
        app.router.add_get(PATH, self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        try:
            await listen(self._runner, self.settings.host, 0)
        except OSError as error:
            raise UserError(
                f"expected an address of this machine for gateways, got {self.settings.host} ({error.strerror}); "
                "set generation.request_host"
            ) from error
        host, port = self._runner.addresses[0][:2]
        if ip_address(host).is_unspecified:
            # On all addresses: gateways get the one that this machine's, or container's, own name stands for.
            host = socket.gethostbyname(socket.gethostname())
        address = f"http://[{host}]:{port}{PATH}" if ":" in host else f"http://{host}:{port}{PATH}"
        log.info("worker takes requests", address=address, slots=self.settings.slots)
        return address

    async def until_idle(self) -> None:
        """Return when no request runs or waits."""
        await self._idle.wait()

    async def close(self) -> None:
        """End all connections, and with them their requests; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def card(self) -> WorkerCard:
        """What gateways get once a second."""
        return WorkerCard(
            worker_id=self.worker_id,
            slots=self.settings.slots,
            takes_requests=self.takes_requests,
            version=self.status.version,
            running=self.running,
        )

    @property
    def takes_requests(self) -> bool:
        """Whether new ones are taken: users are answered by the policy that is served."""
        return self.status.has_weights and not (self.status.is_leaving or self.status.is_of_an_arm)

    def admit(self) -> bool:
        """Take a request, if there is room for one more to wait."""
        if not self.takes_requests or self.waiting + self.running >= self.settings.slots * (1 + WAITING_PER_SLOT):
            return False
        self.waiting += 1
        self._idle.clear()
        return True

    def release(self) -> None:
        """An admitted request is over."""
        self.waiting -= 1
        if not self.waiting + self.running:
            self._idle.set()

    async def _serve(self, http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, heartbeat=PING_S, compress=False)
        await socket.prepare(http)
        if not await prove(socket, self.settings.secret, is_worker=True):
            log.warning("a gateway without our secret was turned away", peer=http.remote)
            await socket.close(code=4401, message=b"expected the run's request secret")
            return socket
        log.info("gateway connected", peer=http.remote)
        try:
            assert http.transport is not None, "the connection has just been opened"
            await GatewayConnection(socket, self, http.transport.abort).serve()
        finally:
            log.info("gateway left", peer=http.remote)
        return socket

    async def sample(self, request: GenerationRequest, take: Callable[[TokenDelta], None]) -> None:
        """Sample an admitted request, in one of the slots.

        Raises:
            PromptRefused: the engine does not take such a prompt.
            EngineError: it failed.
        """
        async with self._places:
            self.running += 1
            self.waiting -= 1
            try:
                async with closed_early(self.engine.generate(request)) as deltas:
                    async for delta in deltas:
                        self.load.sampled("", len(delta.token_ids))
                        take(delta)
            finally:
                self.running -= 1
                self.waiting += 1


@dataclass
class GatewayConnection:
    """One gateway's requests. ``_held``: rows of the next frame, and ``_frames``: what goes before it.

    ``abort`` ends the connection without a word.
    """

    socket: web.WebSocketResponse
    server: RequestServer
    abort: Callable[[], None]
    _held: list[tuple[Any, ...]] = field(default_factory=list)
    _frames: list[bytes] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _running: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)

    async def serve(self) -> None:
        """Take requests until the gateway leaves, then end what it left."""
        loops = [asyncio.create_task(loop()) for loop in (self._send_loop, self._status_loop)]
        try:
            async for message in self.socket:
                if message.type is not WSMsgType.BINARY:
                    break
                self._receive(message.data)
        except ValueError as error:
            log.error("a gateway's frame was not understood", error=str(error))
        finally:
            await end_tasks([*loops, *self._running.values()])
            await self.socket.close()

    def _receive(self, data: bytes) -> None:
        match unpack(data):
            case ["start", int(name), dict(fields)]:
                self._start(name, fields)
            case ["cancel", int(name)]:
                if (task := self._running.get(name)) is not None:
                    task.cancel()
            case [kind, *_]:
                raise ValueError(f"expected start or cancel, got {kind!r:.40}")

    def _start(self, name: int, fields: dict[str, Any]) -> None:
        try:
            wanted = SampleRequest.model_validate(fields)
        except ValidationError as error:
            self._fail(name, "refused", f"expected a request, got: {error.errors()[0]['msg']}")
            return
        if name in self._running or not self.server.admit():
            self._fail(name, "busy", "this worker takes no more requests now")
            return
        request = GenerationRequest(
            request_id=f"request/{name}",
            prompt_token_ids=np.frombuffer(wanted.prompt, "<i4").tolist(),
            sampling=wanted.sampling,
            chunk_tokens=wanted.chunk_tokens,
            interactive=True,
            prefix_token_ids=np.frombuffer(wanted.prefix, "<i4").tolist(),
            traceparent=wanted.traceparent,
            json_schema=wanted.json_schema,
        )
        sampling = self._sample(name, request, wanted.stream_as)
        self._running[name] = task = asyncio.create_task(sampling)
        task.add_done_callback(lambda _: self._over(name))

    def _over(self, name: int) -> None:
        del self._running[name]
        self.server.release()

    async def _sample(self, name: int, request: GenerationRequest, stream_as: str) -> None:
        start, stream = len(request.prefix_token_ids), self.server.tokens if stream_as else None

        def take(delta: TokenDelta) -> None:
            nonlocal start
            if stream is not None:
                stream.offer(stream_as, start, delta)
                start += len(delta.token_ids)
            self._held.append((name, [*delta.token_ids], [*delta.logprobs], *delta.version, delta.finish_reason))
            self._wake.set()
            # The frames before these wait for the gateway to read.
            if len(self._held) > MAX_HELD_DELTAS:
                log.error("a gateway reads too slowly and is disconnected", held=len(self._held))
                self.abort()

        try:
            await self.server.sample(request, take)
        except PromptRefused as error:
            self._fail(name, "refused", str(error))
        except EngineError as error:
            self._fail(name, "failed", str(error))
        except Exception as error:
            log.exception("a request failed", worker=self.server.worker_id)
            self._fail(name, "failed", f"expected a completion, got {type(error).__name__}")

    def _fail(self, name: int, kind: FailureKind, why: str) -> None:
        # Behind the tokens that came before it: frames keep their order.
        self._close_frame()
        self._frames.append(pack("failed", name, kind, why))
        self._wake.set()

    def _close_frame(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._frames.append(pack("tokens", held))

    async def _send_loop(self) -> None:
        """Send what is there in as few frames as it takes, whenever there is something."""
        with suppress(ConnectionError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._close_frame()
                frames, self._frames = self._frames, []
                for frame in frames:
                    await self.socket.send_bytes(frame)

    async def _status_loop(self) -> None:
        while True:
            self._frames.append(pack("status", self.server.card().model_dump()))
            self._wake.set()
            await asyncio.sleep(STATUS_S)
