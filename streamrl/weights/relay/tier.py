"""A relay among others: sends heartbeats, reads those of other relays, and fetches announced versions.

There is no leader: each relay works out its upstream from the heartbeats (``chain.py``). Serving needs no broker: while
the broker is down, no new version is announced, and transfers under way continue.
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

from streamrl.bus.listening import HeartbeatReader
from streamrl.bus.port import Bus, Outgoing, Publisher, TopicPartition, message_of
from streamrl.bus.waiting import end_tasks, in_thread, wait_for_event, wait_for_tasks
from streamrl.schemas.control import AnnouncedWeights, RunIdentity
from streamrl.schemas.errors import BusError, DataLossRefused
from streamrl.schemas.messages import WIRE_VERSION, Message
from streamrl.schemas.reports import RelayBeat
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CONTROL, HEARTBEATS
from streamrl.weights.relay.chain import RelayMember, RelayMembership, upstreams
from streamrl.weights.relay.copies import RelayCopies
from streamrl.weights.relay.following import CopyFollower
from streamrl.weights.relay.limits import TIMES, RelayTimes
from streamrl.weights.series import OwnSeries, WantedSeries
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

log = structlog.get_logger()

PAUSE_S = 1.0
"""Seconds between attempts while the broker does not answer or the disk is full."""
POLL_S = 0.5
LAST_BEAT_S = 1.0
BEAT_VERSIONS = 4
"""Number of newest whole versions that a heartbeat names: no relay asks for older ones."""


@dataclass
class RelayTier:
    """The loops of one relay. Without ``copies`` it serves ``store``, the trainer's own, and fetches nothing.

    ``me``: this relay as the others know it. ``wanted``: which series are held besides the run's own. ``own`` fetches
    the versions of the run's own series; ``followers``, by name, those of each other series.
    """

    bus: Bus
    run_name: str
    me: RelayMember
    store: WeightStore
    copies: RelayCopies | None = None
    heartbeat_timeout_s: float = LoopSettings().heartbeat_timeout_s
    wanted: WantedSeries = field(default_factory=OwnSeries)
    times: RelayTimes = TIMES
    clock: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time
    incarnation: str = field(init=False, default_factory=lambda: uuid.uuid4().hex[:12])
    members: RelayMembership = field(init=False)
    own: CopyFollower | None = field(init=False, default=None)
    followers: dict[str, CopyFollower] = field(init=False, default_factory=dict)
    _announced: dict[str, AnnouncedWeights] = field(init=False, default_factory=dict)
    _run_id: str = field(init=False, default="")
    _others_wanted: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _beats: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.members = RelayMembership(self.heartbeat_timeout_s)
        if self.copies is not None:
            self.own = self._follower(self.copies)
            self.copies.wanted_series = self.wanted.names

    def _follower(self, copies: RelayCopies) -> CopyFollower:
        return CopyFollower(copies, self.route, self.times.upstream_timeout_s, self._changed.set, self.clock)

    async def run(self, stop: asyncio.Event) -> None:
        """Take part in the chain until stopped.

        Consumes: control and heartbeats, unless it serves the trainer's store. Produces: heartbeats; copies.
        Waits for: announcements, upstreams, the interval between two heartbeats.
        On failure: asks the broker again after a pause, or another upstream.
        On stop: announces its leave, within a second; the next start continues a half-fetched version.
        """
        loops = [self._beat_loop]
        if self.copies is not None:
            await in_thread(self.copies.load)
            loops += [self._listen_loop, self._fetch_loop, self._series_loop]
        tasks = [asyncio.create_task(self._persistently(loop)) for loop in loops]
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await wait_for_tasks([*tasks, stopping])

    async def _persistently(self, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except (BusError, DataLossRefused) as error:
                log.warning("relay alone for now", error=str(error))
            except OSError as error:
                log.warning("relay goes on in a moment", error=str(error))
            await asyncio.sleep(PAUSE_S)

    async def _beat_loop(self) -> None:
        publisher = await self.bus.publisher(f"relay-{self.me.relay_id}")
        try:
            while True:
                self._changed.clear()
                await self._beat(publisher)
                await wait_for_event(self._changed, self.times.heartbeat_interval_s)
        finally:
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(LAST_BEAT_S):
                    await self._beat(publisher, leaving=True)
            await publisher.close()

    async def _beat(self, publisher: Publisher, *, leaving: bool = False) -> None:
        held = await in_thread(self.store.versions) if self.copies is None else self.copies.whole()
        others = {} if self.copies is None else self.copies.series
        of_series = {series: tuple(copies.whole()[-BEAT_VERSIONS:]) for series, copies in others.items()}
        beat = RelayBeat(
            relay_id=self.me.relay_id,
            incarnation=self.incarnation,
            address=self.me.address,
            host=self.me.host,
            site=self.me.site,
            has_store=self.me.has_store,
            held=tuple(held[-BEAT_VERSIONS:]),
            held_of_arms={series: versions for series, versions in of_series.items() if versions},
            leaving=leaving,
            wire=WIRE_VERSION,
            sequence=self._beats,
            sent_at=self.time_of_day(),
        )
        self._beats += 1
        await publisher.publish(Outgoing.of(HEARTBEATS.full_name(self.run_name), beat, key=self.me.relay_id))

    async def _listen_loop(self) -> None:
        beats, control = HEARTBEATS.full_name(self.run_name), CONTROL.full_name(self.run_name)
        name = f"relay-{self.me.relay_id}"
        now = await self.bus.subscribe([beats, control], client_id=name, start="latest")
        try:
            ends: dict[TopicPartition, int] = await now.positions()
        finally:
            await now.close()
        # All of control, which is compacted: the newest announcement may be old.
        start = {place: end for place, end in ends.items() if place.topic == beats}
        reading = await self.bus.subscribe([beats, control], client_id=name, start=start)
        try:
            listening = HeartbeatReader(reading, self.members.timeout_s, self.members.extend, self.clock)
            while True:
                for record in await listening.poll(POLL_S):
                    if (message := message_of(record)) is not None:
                        self.hear(message)
                at = await reading.positions()
                # Only after reading up to the end: the latest run identity counts.
                if all(at[place] >= end for place, end in ends.items()) and self._drop_other_runs():
                    return  # to read everything again: some announcements may be the new run's
        finally:
            await reading.close()

    def _drop_other_runs(self) -> bool:
        """Forget copies and announcements if they are another run's; returns whether they were."""
        assert self.copies is not None
        if not self._run_id or not self.copies.belong_to(self._run_id):
            return False
        log.info("copies of another run dropped", run_id=self._run_id)
        self._announced.clear()
        for follower in (self.own, *self.followers.values()):
            if follower is not None:
                follower.forget()
        return True

    def hear(self, message: Message) -> None:
        """Take another process's message into account."""
        if self.wanted.observe(message) and self.copies is not None:
            self.copies.wanted_series = self.wanted.names
            self._others_wanted.set()
        match message:
            case RelayBeat():
                self.members.observe(message.relay_id, message, self.clock())
            case AnnouncedWeights():
                self._announced[message.series] = message
                follower = self.followers.get(message.series) if message.series else self.own
                if follower is not None:
                    follower.hear(message)
            case RunIdentity():
                self._run_id = message.run_id

    async def _fetch_loop(self) -> None:
        assert self.own is not None
        # A relay that has not heard the others yet would fetch the first version outside the chain.
        await asyncio.sleep(2 * self.times.heartbeat_interval_s)
        await self.own.fetch_loop()

    async def _series_loop(self) -> None:
        """Fetch the versions of the other series that are wanted now, in the same way as the run's own.

        Consumes: announcements heard, and which series are wanted. Produces: copies of each series.
        Waits for: a change of the wanted series.
        On failure: a fetch is tried again; other errors are raised, and the caller starts this loop again.
        On stop: is cancelled, with the fetches.
        """
        assert self.copies is not None
        await asyncio.sleep(2 * self.times.heartbeat_interval_s)
        fetching: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._others_wanted.clear()
                wanted = self.copies.wanted_series or frozenset()
                for series in fetching.keys() - wanted:
                    del self.followers[series]
                    # The series may come back, and two fetches must not write to one file.
                    await end_tasks([fetching.pop(series)])
                for series in wanted - fetching.keys():
                    follower = self.followers[series] = self._follower(await self.copies.begin_series(series))
                    if (known := self._announced.get(series)) is not None:
                        follower.hear(known)
                    fetching[series] = asyncio.create_task(follower.fetch_loop())
                changing = asyncio.create_task(self._others_wanted.wait())
                try:
                    await asyncio.wait([changing, *fetching.values()], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changing.cancel()
                for task in fetching.values():
                    if task.done():
                        task.result()
        finally:
            for task in fetching.values():
                task.cancel()
            await wait_for_tasks(fetching.values())

    def route(self, ready: AnnouncedWeights, given_up: frozenset[str]) -> list[str]:
        """Addresses of the upstreams for a version. Until this relay hears another, they are the announcement's."""
        others = [member for member in self.members.living(self.clock()) if member.relay_id != self.me.relay_id]
        if not others:
            return [address for address in ready.relays if address not in given_up and address != self.me.address]
        excluded = {member.relay_id for member in others if member.address in given_up}
        found = upstreams(self.me.relay_id, [*others, self.me], ready.version, excluded, ready.series)
        return [member.address for member in found]


def open_tier(
    bus: Bus,
    run_name: str,
    settings: RelaySettings,
    store: WeightStore,
    copies: RelayCopies | None,
    heartbeat_timeout_s: float,
    wanted: WantedSeries,
) -> RelayTier:
    """The loops of the relay that the settings describe."""
    host, named = socket.gethostname(), settings.host
    with contextlib.suppress(ValueError):  # settings.host is a name
        named = host if ip_address(settings.host).is_unspecified else settings.host
    address = settings.address or f"http://{f'[{named}]' if ':' in named else named}:{settings.port}"
    me = RelayMember(f"{host}:{settings.port}", address, host, settings.site, has_store=copies is None)
    return RelayTier(bus, run_name, me, store, copies, heartbeat_timeout_s, wanted)
