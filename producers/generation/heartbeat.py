"""Reports to dispatcher and coordinator, every second and at every change, that this worker is alive, and its load."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Outgoing, Publisher
from streamrl.bus.waiting import wait_for_event
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.rollout import WorkerLoad
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.errors import BusError
from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import Heartbeat, ResourceUsage

log = structlog.get_logger()

ORDERS_EVERY_S = 5.0
"""Seconds between two heartbeats that list the held orders: a few hundred orders take some kilobytes, and time-outs of
orders are minutes. An empty list takes two bytes and is always sent."""
MeasureUsage = Callable[[], ResourceUsage | None]
"""Measures what this process and its machine use; None: not measured."""
RATE_WINDOW_S = 10.0
"""Seconds over which tokens per second are averaged: several chunks of each completion, and still recent."""


@dataclass
class Heartbeats:
    """Writes this incarnation's heartbeats, numbered from 0, from status, load and engine.

    ``capacity``: the engine's slots for work orders. ``clock`` returns the time of day. ``usage`` measures the process.
    """

    publisher: Publisher
    topic: str
    worker_id: str
    incarnation: str
    engine: Engine
    capacity: int
    load: WorkerLoad
    status: WorkerStatus
    clock: Callable[[], float] = time.time
    usage: MeasureUsage = lambda: None
    _sequence: int = field(init=False, default=0)
    _rates: deque[tuple[float, int]] = field(init=False, default_factory=deque)
    _named_at: float = field(init=False, default=-math.inf)

    async def heartbeat_loop(self, interval_s: float) -> None:
        """Send heartbeats until cancelled.

        Consumes: status and load. Produces: heartbeats.
        Waits for: the interval, or until the status wakes it.
        On failure: a heartbeat that cannot be sent is logged; the next one has all of its content.
        On stop: is cancelled; the caller sends a last heartbeat with ``beat``.
        """
        while True:
            await wait_for_event(self.status.changed, interval_s)
            # Cleared before the heartbeat is sent: a change during the sending causes the next heartbeat at once.
            self.status.changed.clear()
            await self.beat()

    async def beat(self) -> None:
        """Send one heartbeat; a failure is only logged."""
        try:
            await self.publisher.publish(Outgoing.of(self.topic, self._heartbeat(), key=self.worker_id))
        except BusError as error:
            log.warning("heartbeat not sent", error=str(error))

    def _heartbeat(self) -> Heartbeat:
        status, load, now = self.status, self.load, self.load.monotonic()
        # The engine does not report which requests wait: it runs as many as it has slots, and the others wait.
        running = min(load.generating, self.capacity)
        self._sequence += 1
        return Heartbeat(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            state=status.state,
            engine=self.engine.name,
            version=status.version,
            capacity=self.capacity,
            running=running,
            waiting=load.generating - running,
            generated_tokens=load.generated_tokens,
            finished_trajectories=load.finished_trajectories,
            tokens_per_s=self._rate(now),
            orders=self._orders(now),
            kv_tokens=self.engine.kv_tokens,
            run_id=status.run_id,
            partials_from=status.partials_from,
            released=status.released,
            awaits=status.awaits,
            request_address=status.request_address,
            policy=status.policy,
            declined=status.declined(now),
            wire=WIRE_VERSION,
            usage=self.usage(),
            sequence=self._sequence - 1,
            sent_at=self.clock(),
        )

    def _orders(self, now: float) -> dict[str, float] | None:
        orders = self.load.held_orders()
        if orders and now - self._named_at < ORDERS_EVERY_S:
            return None
        self._named_at = now
        return orders

    def _rate(self, now: float) -> float:
        self._rates.append((now, self.load.generated_tokens))
        # At least two entries are kept: a rate needs an interval, even if heartbeats are further apart than the window.
        while len(self._rates) > 2 and self._rates[0][0] < now - RATE_WINDOW_S:
            self._rates.popleft()
        (started_at, before) = self._rates[0]
        elapsed = now - started_at
        return max(0.0, (self.load.generated_tokens - before) / elapsed) if elapsed > 0 else 0.0
