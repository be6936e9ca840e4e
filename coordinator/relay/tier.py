"""A relay among others: says on the bus that it is there, hears who else is, and fetches what is announced.

Nobody leads: each relay works out its upstream from the heartbeats that it hears (``chain.py``). Serving needs no
broker: while none answers, nothing new is announced, and what is under way goes on.
"""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address

import structlog

from bus.port import Bus, Outgoing, Publisher, TopicPartition, message_of
from coordinator.relay.chain import RelayMember, RelayMembership, upstreams
from coordinator.relay.copies import RelayCopies
from coordinator.relay.server import WeightsStore
from coordinator.relay.transfer import ChainTransfer
from coordinator.settings import RelaySettings
from schemas.control import WeightsReady
from schemas.errors import BusError, DataLossRefused, WeightsError
from schemas.identifiers import PolicyVersion
from schemas.messages import WIRE_VERSION, Message
from schemas.reports import RelayBeat
from schemas.topics import CONTROL, HEARTBEATS

log = structlog.get_logger()

PAUSE_S = 1.0
"""Between attempts at a broker that does not answer, or a disk that is full."""
POLL_S = 0.5
LAST_BEAT_S = 1.0
TOLD_VERSIONS = 4
"""Newest whole versions that a beat names: nobody asks for older ones."""


@dataclass
class RelayTier:
    """The loops of one relay; ``copies`` None: it serves ``store``, the trainer's own, and fetches nothing.

    ``me``: as the others will know it.
    """

    bus: Bus
    run_name: str
    settings: RelaySettings
    me: RelayMember
    store: WeightsStore
    copies: RelayCopies | None = None
    clock: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    members: RelayMembership = field(init=False)
    transfer: ChainTransfer | None = None
    _wanted: WeightsReady | None = None
    _announced: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _beats: int = 0

    def __post_init__(self) -> None:
        self.members = RelayMembership(self.settings.timeout_s)
        if self.copies is not None:
            self.transfer = ChainTransfer(self.copies, self.route, self.settings.timeout_s, self._is_overtaken)

    async def run(self, stop: asyncio.Event) -> None:
        """Be a member until stopped.

        Consumes: control and heartbeats, unless it serves the trainer's store. Produces: heartbeats; copies.
        Waits for: announcements, upstreams, the interval between two beats.
        On failure: a broker that does not answer is asked again after a pause, an upstream's place is taken by another.
        On stop: says that it leaves, within a second; a version that is half fetched is gone on with at the next start.
        """
        loops = [self._beat_loop]
        if self.copies is not None:
            await asyncio.to_thread(self.copies.load)
            loops += [self._listen_loop, self._fetch_loop]
        tasks = [asyncio.create_task(self._persistently(loop)) for loop in loops]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.wait([*tasks, stopping])

    async def _persistently(self, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except (BusError, DataLossRefused) as error:
                log.warning("relay alone for now", error=str(error))
            await asyncio.sleep(PAUSE_S)

    async def _beat_loop(self) -> None:
        publisher = await self.bus.publisher(f"relay-{self.me.relay_id}")
        try:
            while True:
                self._changed.clear()
                await self._beat(publisher)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.settings.heartbeat_interval_s):
                        await self._changed.wait()
        finally:
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(LAST_BEAT_S):
                    await self._beat(publisher, leaving=True)
            await publisher.close()

    async def _beat(self, publisher: Publisher, *, leaving: bool = False) -> None:
        held = await asyncio.to_thread(self.store.versions) if self.copies is None else self.copies.whole()
        beat = RelayBeat(
            relay_id=self.me.relay_id,
            incarnation=self.incarnation,
            address=self.me.address,
            host=self.me.host,
            site=self.me.site,
            has_store=self.me.has_store,
            held=tuple(held[-TOLD_VERSIONS:]),
            leaving=leaving,
            wire=WIRE_VERSION,
            sequence=self._beats,
            sent_at=self.time_of_day(),
        )
        self._beats += 1
        await publisher.publish(Outgoing.of(HEARTBEATS.full_name(self.run_name), beat, key=self.me.relay_id))

    async def _listen_loop(self) -> None:
        topics, name = (
            [HEARTBEATS.full_name(self.run_name), CONTROL.full_name(self.run_name)],
            f"relay-{self.me.relay_id}",
        )
        now = await self.bus.subscribe(topics[:1], client_id=name, start="latest")
        try:
            start: dict[TopicPartition, int] = await now.positions()
        finally:
            await now.close()
        # Of control, which is compacted, everything: the weights announced last may be old.
        reading = await self.bus.subscribe(topics, client_id=name, start=start)
        try:
            while True:
                for record in await reading.poll(timeout_s=POLL_S):
                    if (message := message_of(record)) is not None:
                        self.hear(message)
        finally:
            await reading.close()

    def hear(self, message: Message) -> None:
        """Take a message of another process into account."""
        match message:
            case RelayBeat():
                self.members.observe(message, self.clock())
            case WeightsReady():
                # The same version again names other relays.
                if self._wanted is None or message.version >= self._wanted.version:
                    self._wanted = message
                    self._announced.set()

    async def _fetch_loop(self) -> None:
        """One version at a time, to its end, and then the newest: over a slow link none would ever be whole if each
        newer one began in its place.
        """
        assert self.copies is not None
        assert self.transfer is not None
        # Whoever has heard nobody yet would take the first version past the chain.
        await asyncio.sleep(2 * self.settings.heartbeat_interval_s)
        while True:
            await self._announced.wait()
            self._announced.clear()
            ready = self._wanted
            if ready is None or self._holds(self.copies, ready):
                continue
            began = self.clock()
            try:
                await self.transfer.fetch(ready)
            except (WeightsError, OSError) as error:
                log.warning("weights not fetched", version=str(ready.version), error=str(error))
                self._announced.set()
                await asyncio.sleep(PAUSE_S)
            else:
                log.info("weights at hand", version=str(ready.version), seconds=round(self.clock() - began, 3))
                self._changed.set()

    @staticmethod
    def _holds(copies: RelayCopies, ready: WeightsReady) -> bool:
        """Whether nothing is to be fetched: it is there, or what is there is newer."""
        newest: PolicyVersion | None = max(copies.whole(), default=None)
        return newest is not None and newest >= ready.version

    def _is_overtaken(self, ready: WeightsReady) -> bool:
        return self._wanted is not None and self._wanted.version > ready.version

    def route(self, ready: WeightsReady, given_up: frozenset[str]) -> list[str]:
        """Addresses of the upstreams for a version; until another relay is heard, those that its announcement names."""
        others = [member for member in self.members.living(self.clock()) if member.relay_id != self.me.relay_id]
        if not others:
            return [address for address in ready.relays if address not in given_up and address != self.me.address]
        gone = {member.relay_id for member in others if member.address in given_up}
        return [member.address for member in upstreams(self.me.relay_id, [*others, self.me], ready.version, gone)]


def open_tier(
    bus: Bus, run_name: str, settings: RelaySettings, store: WeightsStore, copies: RelayCopies | None
) -> RelayTier:
    """The loops of the relay that the settings describe."""
    host, named = socket.gethostname(), settings.host
    with contextlib.suppress(ValueError):  # a name, which others may know
        named = host if ip_address(settings.host).is_unspecified else settings.host
    address = settings.address or f"http://{f'[{named}]' if ':' in named else named}:{settings.port}"
    me = RelayMember(f"{host}:{settings.port}", address, host, settings.site, has_store=copies is None)
    return RelayTier(bus, run_name, settings, me, store, copies)
