"""A publisher on the simulated bus.

Per partition and session its records arrive in the order of submission, each once, however often it is sent. A send
that was given up may arrive later, after others of a newer session, but never before an earlier one of its own.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamrl.bus.port import Outgoing, Position, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown
from tests.simulation.bus.broker import partition_of
from tests.simulation.processes import OUTSIDE

if TYPE_CHECKING:
    from tests.simulation.bus.sim_bus import SimBus

CLOSE_FLUSH_S = 5.0


@dataclass(eq=False, slots=True)
class _Send:
    record: Outgoing
    future: "asyncio.Future[Position]"
    stamp: float
    offset: int | None = None
    is_given_up: bool = False


@dataclass(eq=False, slots=True)
class _Lane:
    """Sends to one partition that have not arrived, oldest first; ``late_until``: when the last late one arrives."""

    tp: TopicPartition
    queue: deque[_Send] = field(default_factory=deque)
    late_until: float = 0.0


@dataclass(eq=False)
class SimPublisher:
    """``bus.port.Publisher``."""

    bus: "SimBus"
    name: str
    role: str | None = None
    closed: bool = False
    lanes: dict[TopicPartition, _Lane] = field(default_factory=dict)
    unsettled: "dict[asyncio.Future[Position], None]" = field(default_factory=dict)

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """Hand a record over."""
        self._check_open()
        if record.topic not in self.bus.broker.topics or (not self.bus.broker.is_up and not self.lanes):
            await self.bus.connected(f"topic {record.topic!r}")
        logs = self.bus.broker.logs(record.topic)
        number = partition_of(record.key, len(logs)) if record.partition is None else record.partition
        if not 0 <= number < len(logs):
            raise BusError(f"expected a partition below {len(logs)} of {record.topic}, got {number}")
        self._check_open()
        tp = TopicPartition(record.topic, number)
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        send = _Send(record, future, self.bus.stamp())
        lane = self.lanes.get(tp)
        if lane is None:
            lane = self.lanes[tp] = _Lane(tp)
        if self.bus.is_perfect:
            self._arrive_at_once(lane, send)
            return future
        self.unsettled[future] = None
        future.add_done_callback(self._settled)
        lane.queue.append(send)
        if len(lane.queue) == 1:
            self._transmit(lane, send)
        asyncio.get_running_loop().call_later(self.bus.chances.rates.delivery_timeout_s, self._give_up, lane, send)
        return future

    async def publish(self, record: Outgoing) -> Position:
        """``submit``, and wait for the answer."""
        return await (await self.submit(record))

    async def flush(self) -> None:
        """Wait for everything submitted."""
        if self.unsettled:
            await asyncio.wait(list(self.unsettled))

    async def close(self) -> None:
        """Flush within five seconds; the rest is given up."""
        if self.closed:
            return
        self.closed = True
        if self.unsettled and not self.bus.is_over:
            await asyncio.wait(list(self.unsettled), timeout=CLOSE_FLUSH_S)
        for future in [*self.unsettled]:
            if not future.done():
                future.set_exception(DeliveryUnknown(f"{self.name} was closed before the broker answered"))
                future.exception()
        for lane in self.lanes.values():
            lane.queue.clear()

    def _check_open(self) -> None:
        self.bus.check_caller()
        if self.closed:
            raise BusError(f"publisher {self.name} is closed; open a new one")

    def _settled(self, future: "asyncio.Future[Position]") -> None:
        self.unsettled.pop(future, None)

    def _arrive_at_once(self, lane: _Lane, send: _Send) -> None:
        send.offset = self.bus.broker.append(lane.tp, send.record, stamp=send.stamp)
        self.bus.events.add("append", self.name, *lane.tp, send.offset)
        self._acknowledge(lane, send)

    def _transmit(self, lane: _Lane, send: _Send) -> None:
        """Runs in the writer's process: one attempt, with what the network makes of it."""
        is_waiting = bool(lane.queue) and lane.queue[0] is send
        # Who waited may have been cancelled: the record was handed over all the same, and those behind it wait for it.
        if send.is_given_up or self.closed or self.bus.is_over or (send.future.done() and not is_waiting):
            return
        chances, loop = self.bus.chances, asyncio.get_running_loop()
        if not chances.happens(chances.rates.request_lost):
            delay = chances.latency() + self.bus.network.append_s(lane.tp)
            loop.call_later(delay, self._arrive, lane, send, context=OUTSIDE)
        loop.call_later(chances.rates.retry_s, self._transmit, lane, send)

    def _arrive(self, lane: _Lane, send: _Send) -> None:
        """Runs at the broker."""
        broker, chances = self.bus.broker, self.bus.chances
        if not broker.is_up or not self.bus.network.reaches_leader(self.role, lane.tp):
            return
        if send.offset is None:
            if not lane.queue or lane.queue[0] is not send:
                return
            lane.queue.popleft()
            if chances.happens(chances.rates.refused):
                self._answer(lane, send, BusUnavailable(f"no leader for {lane.tp}: send it again"))
            else:
                send.offset = broker.append(lane.tp, send.record, stamp=send.stamp)
                self.bus.events.add("append", self.name, *lane.tp, send.offset)
            self._next(lane)
        if send.offset is not None and not chances.happens(chances.rates.ack_lost):
            self._answer(lane, send, None)

    def _next(self, lane: _Lane) -> None:
        if lane.queue:
            asyncio.get_running_loop().call_soon(self._transmit, lane, lane.queue[0], context=self.bus.context_of(self))

    def _answer(self, lane: _Lane, send: _Send, error: BusError | None) -> None:
        loop, context = asyncio.get_running_loop(), self.bus.context_of(self)
        if error is None:
            loop.call_later(self.bus.chances.latency(), self._acknowledge, lane, send, context=context)
        else:
            loop.call_later(self.bus.chances.latency(), self._refuse, send, error, context=context)

    def _acknowledge(self, lane: _Lane, send: _Send) -> None:
        if not send.future.done():
            assert send.offset is not None
            self.bus.events.acked(self.name, *lane.tp, send.offset, send.record.value)
            send.future.set_result(Position(*lane.tp, send.offset))

    def _refuse(self, send: _Send, error: BusError) -> None:
        if not send.future.done():
            self.bus.events.add("refused", self.name)
            send.future.set_exception(error)

    def _give_up(self, lane: _Lane, send: _Send) -> None:
        """The deadline passed, in the writer's process; the record may have arrived, or still do so."""
        was_waiting = send in lane.queue
        if send.future.done() and not was_waiting:
            return
        send.is_given_up = True
        if was_waiting:
            was_first = lane.queue[0] is send
            lane.queue.remove(send)
            self._maybe_late(lane, send)
            if was_first:
                self._next(lane)
        if send.future.done():
            return
        self.bus.events.add("unknown", self.name, *lane.tp)
        send.future.set_exception(
            DeliveryUnknown(f"expected {lane.tp} to take a record in time; it may have arrived, send it again")
        )

    def _maybe_late(self, lane: _Lane, send: _Send) -> None:
        chances, loop = self.bus.chances, asyncio.get_running_loop()
        if chances.happens(chances.rates.late):
            lane.late_until = max(lane.late_until, loop.time() + chances.random.random() * chances.rates.latest_s)
            lane.late_until += 1e-6
            loop.call_at(lane.late_until, self._arrive_late, lane, send, context=OUTSIDE)

    def _arrive_late(self, lane: _Lane, send: _Send) -> None:
        if self.bus.broker.is_up and send.offset is None:
            send.offset = self.bus.broker.append(lane.tp, send.record, stamp=send.stamp)
            self.bus.events.add("late", self.name, *lane.tp, send.offset)
