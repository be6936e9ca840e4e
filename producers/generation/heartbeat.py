"""Tells dispatcher and coordinator, every second and at every change, that this worker lives and what it holds."""

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Outgoing, Publisher
from streamrl.bus.waiting import happens_within
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.rollout import WorkerLoad
from streamrl.schemas.errors import BusError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import Heartbeat, ReleasedOrder, WorkerState

log = structlog.get_logger()

ORDERS_EVERY_S = 5.0
"""Between two heartbeats that name the orders held: a few hundred of them are some kilobytes, and time-outs of orders
are minutes. That nothing is held costs two bytes and is always said."""
RATE_WINDOW_S = 10.0
"""Tokens a second are told over this long: several chunks of each completion, and yet of the present."""
NO_VERSION = PolicyVersion(0, 0)
"""Held by a worker that has no weights yet; trainers count lineages from 1."""


@dataclass
class Heartbeats:
    """Writes this incarnation's heartbeats, numbered from 0.

    ``request_slots``: of the engine's slots, those that no order gets; ``request_address``: where gateways connect.
    ``policy``: the arm of a split whose weights the engine has; ``declined``: evaluation orders not taken, by attempt.
    """

    publisher: Publisher
    topic: str
    worker_id: str
    engine: Engine
    load: WorkerLoad
    clock: Callable[[], float] = time.time
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    state: WorkerState = WorkerState.STARTING
    version: PolicyVersion = NO_VERSION
    awaits: PolicyVersion | None = None
    run_id: str | None = None
    partials_from: Callable[[], int | None] = lambda: None
    released: Callable[[], tuple[ReleasedOrder, ...] | None] = lambda: None
    request_slots: int = 0
    request_address: str | None = None
    policy: Callable[[], str] = lambda: ""
    declined: Callable[[], dict[str, int]] = dict
    _sequence: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _rates: deque[tuple[float, int]] = field(default_factory=deque)
    _named_at: float = -math.inf

    def update(self, *, state: WorkerState | None = None, version: PolicyVersion | None = None) -> None:
        """Note a state or version; a change is sent at once."""
        state, version = state or self.state, version or self.version
        if (state, version) != (self.state, self.version):
            self.state, self.version = state, version
            self._changed.set()

    def tell(self) -> None:
        """Send one at once: something changed that it says."""
        self._changed.set()

    def await_idle(self, version: PolicyVersion | None) -> None:
        """Say at once that this version waits until nothing runs; none: no more."""
        if version != self.awaits:
            self.awaits = version
            self._changed.set()

    def take_requests_at(self, address: str) -> None:
        """Name this address in every heartbeat from now on; it is told at once."""
        self.request_address = address
        self._changed.set()

    def belong_to(self, run_id: str) -> None:
        """Name this run in every heartbeat from now on."""
        self.run_id = run_id

    async def heartbeat_loop(self, interval_s: float) -> None:
        """Beat.

        Consumes: the load. Produces: heartbeats.
        Waits for: the interval, or a change of state or version.
        On failure: a heartbeat that cannot be sent is logged; the next one says it all again.
        On stop: is cancelled; ``beat`` once more to say so.
        """
        while True:
            await happens_within(self._changed, interval_s)
            # Cleared before the beat: a change that comes while it is being sent is sent by the next one, at once.
            self._changed.clear()
            await self.beat()

    async def beat(self) -> None:
        """Send one heartbeat, whatever comes of it."""
        try:
            await self.publisher.publish(Outgoing.of(self.topic, self._heartbeat(), key=self.worker_id))
        except BusError as error:
            log.warning("heartbeat not sent", error=str(error))

    def _heartbeat(self) -> Heartbeat:
        generating = self.load.generating
        # The engine does not say which requests wait; it runs as many as it has slots, and the others wait.
        capacity = self.engine.max_num_seqs - self.request_slots
        running = min(generating, capacity)
        self._sequence += 1
        return Heartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            state=self.state,
            engine=self.engine.name,
            version=self.version,
            capacity=capacity,
            running=running,
            waiting=generating - running,
            generated_tokens=self.load.generated_tokens,
            finished_trajectories=self.load.finished_trajectories,
            tokens_per_s=self._rate(self.load.monotonic()),
            orders=self._orders(),
            kv_tokens=self.engine.kv_tokens,
            run_id=self.run_id,
            partials_from=self.partials_from(),
            released=self.released(),
            awaits=self.awaits,
            request_address=self.request_address,
            policy=self.policy(),
            declined=self.declined(),
            wire=WIRE_VERSION,
            sequence=self._sequence - 1,
            sent_at=self.clock(),
        )

    def _orders(self) -> dict[str, float] | None:
        orders, now = self.load.held_orders(), self.load.monotonic()
        if orders and now - self._named_at < ORDERS_EVERY_S:
            return None
        self._named_at = now
        return orders

    def _rate(self, now: float) -> float:
        self._rates.append((now, self.load.generated_tokens))
        # Two are kept in any case: a rate needs an interval, also with heartbeats further apart than the window.
        while len(self._rates) > 2 and self._rates[0][0] < now - RATE_WINDOW_S:
            self._rates.popleft()
        (began, before) = self._rates[0]
        elapsed = now - began
        return max(0.0, (self.load.generated_tokens - before) / elapsed) if elapsed > 0 else 0.0
