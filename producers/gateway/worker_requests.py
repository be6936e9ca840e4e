"""A worker's side work for gateways: samples their requests in the same batch as its work orders.

Knows nothing of topics and of the HTTP interface.

Each gateway has one WebSocket to the worker. All of its requests go over it, and all tokens come back, one frame a
decode step. Frames are msgpack arrays whose first entry is their kind:

    gateway → worker    start, name, request    cancel, name
    worker → gateway    status, card            tokens, [[name, ids, log-probs, lineage, number, reason], ...]
                        failed, name, kind, why

Invariants, each with a test of its name:
- only_gateways_with_the_secret_are_answered: each side proves that it has the secret, without sending it;
- requests_keep_to_their_slots: no more requests run at once than there are slots for them; other slots are for orders;
- a_disconnected_gateway_frees_its_slots;
- a_slow_gateway_stalls_nothing: frames that a gateway does not read are held up to a bound, then it is disconnected.
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

from streamrl.bus.serving import OpenRequests, listen
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
"""Room for a prompt of four million tokens; a decode step of thousands of requests is far smaller."""
MAX_HELD_DELTAS = 1 << 16
"""Deltas that a gateway may leave unread: seconds of a large batch. A gateway so far behind does not catch up."""
WAITING_PER_SLOT = 4
"""Requests that may wait in a worker for each slot. A gateway sends as many as there are slots; gateways are few."""
HANDSHAKE_S = 5.0
PING_S = 5.0
STATUS_S = 1.0
_NONCE_BYTES = 32

WebSocket = web.WebSocketResponse | ClientWebSocketResponse


class SampleRequest(Part):
    """A gateway's request for one completion. ``prompt``: token ids as little-endian int32.

    ``prefix``: the completion's first token ids, which another worker has sampled; ``chunk_tokens``: tokens of one
    delta. ``stream_as``: name of its tokens on the tokens topic, if the worker streams tokens; empty: they are not
    published. ``json_schema`` and ``traceparent``: see ``GenerationRequest``.
    """

    prompt: Annotated[bytes, Field(max_length=MAX_FRAME_BYTES)]
    prefix: Annotated[bytes, Field(max_length=MAX_FRAME_BYTES)] = b""
    sampling: SamplingParams
    json_schema: Annotated[str, Field(max_length=MAX_FRAME_BYTES)] = ""
    chunk_tokens: Annotated[int, Field(ge=1)] = 1
    stream_as: ShortText = ""
    traceparent: ShortText = ""


class WorkerCard(Part):
    """A worker's status for gateways: whether it takes requests, its slots for them, and the requests that run."""

    worker_id: ShortText
    slots: Annotated[int, Field(ge=1)]
    takes_requests: bool
    version: PolicyVersion
    running: Annotated[int, Field(ge=0)]


FailureKind = Literal["refused", "busy", "failed"]
"""``refused``: no worker will sample the request; ``busy``: this worker has no room now; ``failed``: the engine failed,
and another worker may succeed.
"""


class SampledTokens(NamedTuple):
    """New tokens of one request, as a row of a frame. ``name``: the request's number."""

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
    """A frame from its bytes.

    Raises:
        ValueError: they are not a frame.
    """
    try:
        frame = msgpack.unpackb(data, use_list=True)
    except Exception as error:  # msgpack raises several types, and not all are ValueErrors
        raise ValueError(f"expected a msgpack frame, got {type(error).__name__}") from error
    if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
        raise ValueError("expected a frame that starts with its kind, got another value")
    return frame


def sampled_of(rows: list[Any]) -> list[SampledTokens]:
    """The rows of a frame of tokens."""
    return [
        SampledTokens(name, ids, logprobs, PolicyVersion(lineage, number), reason)
        for name, ids, logprobs, lineage, number, reason in rows
    ]


async def verify_peer(socket: WebSocket, secret: str, *, is_worker: bool) -> bool:
    """Whether the other side has the secret too. Proves to it that this side has the secret.

    Each side sends a nonce, then the HMAC-SHA-256 of its own role and both nonces. So a proof is valid for one side of
    one connection.
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
    except (TimeoutError, TypeError, ClientConnectionError):  # TypeError: the other side closed, or sent text
        return False
    return hmac.compare_digest(found, _proof(secret, nonces, is_worker=not is_worker))


def _proof(secret: str, nonces: bytes, *, is_worker: bool) -> bytes:
    role = b"worker" if is_worker else b"gateway"
    return hmac.digest(secret.encode(), role + nonces, "sha256")


def shared_secret(path: Path) -> str:
    """The secret that gateways and workers of one run directory share. The first process that needs it creates it.

    Raises:
        UserError: the file can be neither read nor created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file is complete before it gets its name, so two processes that start together use the same secret.
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
    """A worker's side work for gateways. ``slots``: the engine's slots for requests; ``host``: address to listen on;
    ``secret``: shared with the gateways.
    """

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
    """Serves gateways. ``running``: number of requests in the engine; ``waiting``: of those that wait for a slot.

    ``load``: shared with the work orders, so heartbeats count the tokens of both. ``tokens``: the token stream, which
    also gets the tokens of requesters who consent; None if there is no stream.
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
    _open_requests: OpenRequests | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.settings.slots)
        self._idle.set()

    async def subscribe(self) -> None:
        """Do nothing: this side work reads no topic."""

    async def begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Listen, and publish the address in heartbeats. Returns no loops, since each connection has its own.

        Raises:
            UserError: the host is not this machine's.
        """
        self.status.set_request_address(await self.open())
        return []

    async def open(self) -> str:
        """Listen on a free port. Returns the address.

        Raises:
            UserError: the host is not this machine's.
        """
        app = web.Application(client_max_size=1024)
        app.router.add_get(PATH, self._serve)
        self._open_requests = OpenRequests(app, 1.0, handler_cancellation=True)
        runner = self._open_requests.runner
        await runner.setup()
        try:
            await listen(runner, self.settings.host, 0)
        except OSError as error:
            raise UserError(
                f"expected an address of this machine for gateways, got {self.settings.host} ({error.strerror}); "
                "set generation.request_host"
            ) from error
        host, port = runner.addresses[0][:2]
        if ip_address(host).is_unspecified:
            # It listens on all addresses; gateways get the one that this machine's (or container's) name resolves to.
            host = socket.gethostbyname(socket.gethostname())
        address = f"http://[{host}]:{port}{PATH}" if ":" in host else f"http://{host}:{port}{PATH}"
        log.info("worker takes requests", address=address, slots=self.settings.slots)
        return address

    async def until_idle(self) -> None:
        """Return when no request runs or waits."""
        await self._idle.wait()

    async def close(self) -> None:
        """End all connections and their requests; idempotent."""
        requests, self._open_requests = self._open_requests, None
        if requests is not None:
            await requests.end()

    def card(self) -> WorkerCard:
        """The status that gateways get once a second."""
        return WorkerCard(
            worker_id=self.worker_id,
            slots=self.settings.slots,
            takes_requests=self.takes_requests,
            version=self.status.version,
            running=self.running,
        )

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are accepted. A worker of an arm refuses them: requests get the served policy."""
        return self.status.has_weights and not (self.status.is_leaving or self.status.has_arm_weights)

    def admit(self) -> bool:
        """Accept a request if one more may wait; whether it was accepted."""
        if not self.takes_requests or self.waiting + self.running >= self.settings.slots * (1 + WAITING_PER_SLOT):
            return False
        self.waiting += 1
        self._idle.clear()
        return True

    def release(self) -> None:
        """Count an admitted request as finished."""
        self.waiting -= 1
        if not self.waiting + self.running:
            self._idle.set()

    async def _serve(self, http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, heartbeat=PING_S, compress=False)
        await socket.prepare(http)
        if not await verify_peer(socket, self.settings.secret, is_worker=True):
            log.warning("a gateway without this worker's secret was refused", peer=http.remote)
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
        """Sample an admitted request in one of the slots.

        Raises:
            PromptRefused: the engine does not accept the prompt.
            EngineError: the engine failed.
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
    """The connection of one gateway. ``_held``: rows of the next frame; ``_frames``: frames that are sent before it.

    ``abort`` ends the connection without a closing handshake.
    """

    socket: web.WebSocketResponse
    server: RequestServer
    abort: Callable[[], None]
    _held: list[tuple[Any, ...]] = field(default_factory=list)
    _frames: list[bytes] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _running: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)

    async def serve(self) -> None:
        """Accept requests until the gateway leaves, then cancel its requests."""
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
            self._fail(name, "busy", "this worker accepts no more requests now")
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
            # So many are held only while earlier frames wait for the gateway to read.
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
        # After the tokens that came before it, since frames keep their order.
        self._close_frame()
        self._frames.append(pack("failed", name, kind, why))
        self._wake.set()

    def _close_frame(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._frames.append(pack("tokens", held))

    async def _send_loop(self) -> None:
        """Send pending frames whenever there are any; all held rows go into one frame."""
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
