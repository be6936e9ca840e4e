"""The simulated bus as one process sees it: publishers and subscriptions on shared logs, with faults from the seed."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import TypeVar

from streamrl.bus.port import Start, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused
from tests.simulation.bus.broker import Broker
from tests.simulation.bus.events import Events
from tests.simulation.bus.faults import PERFECT, Chances
from tests.simulation.bus.groups import SimGroup, SimGroupMember
from tests.simulation.bus.network import NODES, Network, calling_role, coordinator_of
from tests.simulation.bus.reading import SimSubscription, lost
from tests.simulation.bus.transactions import SimTransactionalPublisher
from tests.simulation.bus.writing import SimPublisher
from tests.simulation.processes import PROCESS, Killed

Client = TypeVar("Client")


@dataclass(eq=False)
class SimBus:
    """One for all processes of a simulation. ``is_over``: nobody is served any more."""

    clock: Callable[[], float] = time.time
    chances: Chances = field(default_factory=lambda: Chances(PERFECT, Random(0)))
    is_over: bool = False
    network: Network = field(default_factory=Network)
    broker: Broker = field(init=False)
    events: Events = field(init=False)
    groups: dict[tuple[str, str], SimGroup] = field(default_factory=dict)
    _names: dict[str, "count[int]"] = field(default_factory=dict)
    _contexts: dict[object, Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.broker = Broker(self.clock)
        self.events = Events(self.clock)

    @property
    def is_perfect(self) -> bool:
        """Whether nothing takes time and nothing fails."""
        return self.chances.rates is PERFECT

    def create_topic(self, name: str, partitions: int) -> None:
        """Add a topic; existing ones are left alone."""
        self.broker.create_topic(name, partitions)

    async def publisher(self, client_id: str) -> SimPublisher:
        """A publisher of a new session."""
        await self.connected("a publisher")
        return self._owned(SimPublisher(self, self._named(client_id), calling_role()))

    async def transactional(self, transactional_id: str) -> SimTransactionalPublisher:
        """The newest holder of the id."""
        await self.connected("a transactional publisher", coordinator_of(transactional_id))
        epoch = self.broker.fence(transactional_id)
        name = self._named(transactional_id)
        self.events.add("fence", name, epoch)
        return self._owned(SimTransactionalPublisher(self, name, transactional_id, epoch))

    async def subscribe(
        self,
        topics: Iterable[str],
        *,
        client_id: str,
        start: Start = "earliest",
        partitions: Iterable[int] | None = None,
        group_id: str | None = None,
    ) -> SimSubscription:
        """A subscription placed where ``start`` says."""
        wanted = None if partitions is None else set(partitions)
        await self.connected("a subscription")
        logs = [log for topic in topics for log in self.broker.logs(topic)]
        assigned = [log.tp for log in logs if wanted is None or log.tp.partition in wanted]
        name = self._named(client_id)
        placed = {tp: self._start_of(tp, start) for tp in assigned}
        self.events.add("subscribe", name, tuple(placed.items()))
        return SimSubscription(self, name, placed, group_id, role=calling_role())

    async def join(self, topic: str, *, group_id: str, client_id: str) -> SimGroupMember:
        """A new member of a group, which has its share when it asks for it."""
        await self.connected("a group")
        partitions = [log.tp for log in self.broker.logs(topic)]
        group = self.groups.setdefault((group_id, topic), SimGroup(partitions))
        name = self._named(client_id)
        self.events.add("join", name, group_id)
        return self._owned(SimGroupMember(self, name, group_id, group))

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """How far a group has come."""
        await self.connected("a group's offsets")
        return {
            tp: offset
            for (group, tp), offset in self.broker.committed.items()
            if (group, tp.topic) == (group_id, topic)
        }

    def _start_of(self, tp: TopicPartition, start: Start) -> int:
        log = self.broker.log(tp)
        if start == "earliest":
            return log.first
        if start == "latest":
            return log.stable
        offset = start.get(tp, log.first)
        if offset < log.first:
            raise lost(tp, offset, log.first)
        if offset > len(log.slots):
            end = len(log.slots)
            raise DataLossRefused(
                f"expected offset {offset} of {tp.topic}/{tp.partition}, the log ends at {end}",
                [(tp.topic, tp.partition, end, offset)],
            )
        return offset

    def stamp(self) -> float:
        """The time of day, by the clock of the process that runs now."""
        process = PROCESS.get()
        return self.clock() if process is None or process.clock is None else process.clock()

    async def connected(self, what: str, node: int | None = None) -> None:
        """The broker answers, sooner or later: this node of it, or (none) any that is reached.

        Raises:
            BusUnavailable: it does not within the time-out.
        """
        self.check_caller()
        if self.is_perfect:
            return
        rates = self.chances.rates
        loop = asyncio.get_running_loop()
        deadline = loop.time() + rates.connect_timeout_s
        await asyncio.sleep(self.chances.latency())
        while not self._answers(node):
            if loop.time() >= deadline:
                raise BusUnavailable(f"expected {what} from the broker, got no answer in {rates.connect_timeout_s} s")
            await asyncio.sleep(rates.connect_timeout_s / 4)

    def _answers(self, node: int | None) -> bool:
        role = calling_role()
        nodes = range(NODES) if node is None else (node,)
        return self.broker.is_up and any(self.network.reaches(role, each) for each in nodes)

    def check_caller(self) -> None:
        """Serve nobody who is dead, and nobody once the simulation is over."""
        if self.is_over:
            raise BusError("the simulation is over")
        process = PROCESS.get()
        if process is not None and process.is_dead:
            raise Killed

    def context_of(self, client: object) -> Context:
        """The context of the process that opened a client: answers reach it there, unless it is dead or stopped."""
        return self._contexts[client]

    def _owned(self, client: Client) -> Client:
        self._contexts[client] = copy_context()
        return client

    def _named(self, client_id: str) -> str:
        return f"{client_id}#{next(self._names.setdefault(client_id, count(1)))}"
