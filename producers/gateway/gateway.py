"""The gateway's driver: finds workers by their heartbeats, serves the HTTP interface, publishes rewarded trajectories.

Invariant requests_need_no_broker: once the gateway knows a worker, it answers requests without waiting for Kafka.
"""

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp

from streamrl.bus.port import Bus, Start, Subscription, message_of
from streamrl.bus.waiting import in_thread, wait_for_tasks
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.gateway.app import NoRequestObserver, RequestObserver, build_app
from streamrl.producers.gateway.calls import CallObserver, NoCallObserver, ServedModel
from streamrl.producers.gateway.feedback import FeedbackDesk, FeedbackStore
from streamrl.producers.gateway.keys import KeyFile, KeyRing
from streamrl.producers.gateway.links import WorkerPool
from streamrl.producers.gateway.listening import BACKLOG, listen
from streamrl.producers.gateway.service import CompletionService
from streamrl.producers.gateway.sessions import SessionBook
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.producers.generation.outbox import Outbox
from streamrl.producers.lengths.predictor import ObservedQuantiles
from streamrl.schemas.control import Control, WeightsReady
from streamrl.schemas.errors import BusError
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import Heartbeat
from streamrl.schemas.topics import CONTROL, HEARTBEATS, TRAJECTORIES, Topic

log = structlog.get_logger()

CLIENT_ID = "gateway"
POLL_S = 0.5
RETRY_S = 1.0
TICK_S = 1.0
SHUTDOWN_TIMEOUT_S = 15.0
"""Seconds after SIGTERM for running requests to end, while new ones are refused."""


@dataclass(frozen=True)
class GatewayObservers:
    """``requests`` observes requests, for metrics. ``calls`` observes calls, for traces. ``on_tick`` is called with a
    loop's name at each turn of that loop.
    """

    requests: RequestObserver = field(default_factory=NoRequestObserver)
    calls: CallObserver = field(default_factory=NoCallObserver)
    on_tick: Callable[[str], None] = lambda name: None


@dataclass
class Gateway:
    """The gateway, one per process. ``directory``: its own, kept between restarts.

    ``secret``: shared with the run's workers. ``lone_refusal``: why the run's algorithm learns nothing from a group of
    one, and what to do about it; empty if it does learn. ``policies``: creates the view of the policies that share the
    run.
    """

    bus: Bus
    run_name: str
    model: ServedModel
    settings: GatewaySettings
    secret: str
    directory: Path
    lone_refusal: str = ""
    observers: GatewayObservers = field(default_factory=GatewayObservers)
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch
    pool: WorkerPool = field(init=False)
    book: SessionBook = field(init=False)
    desk: FeedbackDesk = field(init=False)
    address: str = field(init=False, default="")

    def __post_init__(self) -> None:
        settings = self.settings
        self.pool = WorkerPool(self.secret, settings.max_queued)
        timeout_s, path = settings.feedback_timeout_s, self.directory / "feedback.sqlite"
        store = FeedbackStore(path, timeout_s, lone_refusal=self.lone_refusal)
        self.book = SessionBook(self.model.tokenizer, timeout_s)
        self.desk = FeedbackDesk(store, self.model.loop, TRAJECTORIES.full_name(self.run_name), self.book)

    @property
    def keys(self) -> KeyFile:
        """The file of API keys."""
        return KeyFile(self.settings.key_file(self.directory))

    def app(self) -> ASGIApp:
        """This gateway's HTTP interface."""
        predictor = ObservedQuantiles(self.model.loop)
        service = CompletionService(self.model, self.pool, predictor, self.desk, self.observers.calls)
        keys = KeyRing(self.keys, self.settings.require_key)
        return build_app(service, keys, self.settings, self.observers.requests)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until stopped.

        Consumes: HTTP requests; heartbeats, from now on; control messages, for the served policy; workers' tokens, over
            a connection to each worker.
        Produces: answers; trajectories of completions that got a reward.
        Waits for: requesters. No request waits for the broker.
        On failure: another worker continues the completions of a lost worker. During an outage of the broker no new
            worker is found, and rewarded completions stay on the disk. ``UserError``: the port is taken.
        On stop: accepts no more requests, gives running ones ``SHUTDOWN_TIMEOUT_S``; completions kept for feedback
            stay on the disk.
        """
        self.keys.read()  # reports an invalid file now rather than in every answer
        async with AsyncExitStack() as closing:
            listener = closing.enter_context(listen(self.settings.host, self.settings.port))
            # Registered before the store opens: a cancellation during ``open`` would leave it open.
            closing.push_async_callback(self.desk.close)
            await in_thread(self.desk.store.open)
            closing.push_async_callback(self.pool.close)
            await self._run_loops(listener, stop)

    async def _run_loops(self, listener: socket.socket, stop: asyncio.Event) -> None:
        loops = [
            asyncio.create_task(loop)
            for loop in (
                self._discover_loop(),
                self._follow_loop(),
                self._deliver_loop(),
                self.desk.write_loop(),
                self.pool.sweep_loop(),
                self._tick_loop(),
            )
        ]
        host, port = listener.getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self.lone_refusal:
            log.warning(f"a prompt's only completion is not kept for feedback: {self.lone_refusal}")
        log.info("gateway ready", address=f"{self.address}/v1", model=self.model.name)
        try:
            await self._serve(listener, loops, stop)
        finally:
            for task in loops:
                task.cancel()
            await wait_for_tasks(loops)

    async def _serve(self, listener: socket.socket, loops: "list[asyncio.Task[None]]", stop: asyncio.Event) -> None:
        server = _Server(
            uvicorn.Config(
                self.app(),
                http="httptools" if importlib.util.find_spec("httptools") else "h11",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=max(1, round(SHUTDOWN_TIMEOUT_S)),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, stopping, *loops}, return_when=asyncio.FIRST_COMPLETED)
            for task in loops:
                if task.done():
                    task.result()  # a loop ends only by an exception, which this raises
        finally:
            stopping.cancel()
            server.should_exit = True
            try:
                await wait_for_tasks([serving], on_cancel=server.hurry)
            finally:
                await server.end_requests()
        serving.result()

    async def _discover_loop(self) -> None:
        """Follow heartbeats until cancelled, through outages of the broker."""
        lost = "the broker does not answer, so no new workers are found"
        async for message in self._messages(HEARTBEATS, "latest", lost):
            if isinstance(message, Heartbeat):
                self.pool.heard(message)

    async def _follow_loop(self) -> None:
        """Follow which policy is served until cancelled, through outages of the broker."""
        lost = "the broker does not answer, so a change of the served policy goes unnoticed"
        policies = self.policies()
        async for message in self._messages(CONTROL, "earliest", lost):
            if isinstance(message, Control):
                policies.observe(message)
                self.desk.train(policies.trained)
                if isinstance(message, WeightsReady):
                    self.desk.announce(message.version)

    async def _messages(self, topic: Topic, start: Start, lost: str) -> AsyncIterator[Message]:
        while True:
            subscription: Subscription | None = None
            try:
                name = topic.full_name(self.run_name)
                subscription = await self.bus.subscribe([name], client_id=CLIENT_ID, start=start)
                while True:
                    for record in await subscription.poll(timeout_s=POLL_S):
                        if (message := message_of(record)) is not None:
                            yield message
            except BusError as error:
                log.warning(lost, error=str(error))
                await asyncio.sleep(RETRY_S)
            finally:
                if subscription is not None:
                    await subscription.close()

    async def _deliver_loop(self) -> None:
        """Publish rewarded completions until cancelled, through outages of the broker."""
        while True:
            try:
                publisher = await self.bus.publisher(CLIENT_ID)
            except BusError as error:
                log.warning("the broker does not answer, so rewarded completions stay on the disk", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self.desk.deliver_loop(Outbox(publisher, max_undelivered=1))
            finally:
                await publisher.close()

    async def _tick_loop(self) -> None:
        while True:
            self.observers.on_tick("gateway")
            await asyncio.sleep(TICK_S)


class _Server(uvicorn.Server):
    """uvicorn as a task of a process that handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def hurry(self) -> None:
        """Stop waiting for running requests."""
        self.force_exit = True

    async def end_requests(self) -> None:
        """Cancel the requests that took longer than the time-out, and wait for them, which uvicorn does not."""
        requests = [*self.server_state.tasks]
        for task in requests:
            task.cancel()
        await wait_for_tasks(requests)
        for connection in [*self.server_state.connections]:
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
