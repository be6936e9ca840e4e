"""Follows a run's topics and folds them into a run's state. Reads only; joins no group and commits nothing."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import structlog

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.kafka.connection import BrokerAvailability
from streamrl.bus.port import Bus, Record, Subscription, TopicPartition
from streamrl.bus.waiting import end_tasks
from streamrl.observability.run_state.pace import OFTEN_S
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import BrokerError, BusError, BusUnavailable, DataLossRefused
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, EVALUATIONS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, Topic

log = structlog.get_logger()

POLL_S = 2.0
MORE_POLLS, GATHER_S = 3, 0.05
"""Brokers answer one by one: after the first answer there are so many polls for the others', which wait so long."""
RETRY_S = 2.0
ENDS_EVERY_S = 5.0
MAX_RECORDS = 2000
FEW = 3
"""Records of a further topic to begin with: only the newest is told."""
Past = Mapping[Topic, int | None]
"""Topics that are read, with the offsets of the past to begin with, over all partitions of a topic; None: all of it."""
RECENT: Past = {CONTROL: 1 << 40, STEPS: 4000, HEARTBEATS: 4000, SKIPS: 4000, TRAJECTORIES: 1500, DEAD_LETTERS: 0}
"""For displays of a run: whole but for what is long past."""
WHOLE_RUN: Past = {CONTROL: None, STEPS: None, HEARTBEATS: None, SKIPS: None}
"""For the summary of a run: every step and every skip, and no trajectory."""


def with_evaluations(past: Past) -> Past:
    """The same, of a run that has evaluations during training: others may have no such topic."""
    return {**past, EVALUATIONS: None}


COUNTED = (TRAJECTORIES,)
"""Topics whose ends are asked for, whether they are read or not. Orders are not even counted: they have more partitions
than all the others, and heartbeats tell what workers were given."""


@dataclass
class RunFeed:
    """``state`` is complete up to the last poll. ``shards`` None: partitions cannot be told by bucket.

    ``availability`` is shared with what else reads from ``bus``. ``without_prefetch``: the same bus, which does nothing
    between two reads; what comes is read from it, if there is one. ``pace_s``: seconds between two reads. ``past``:
    see ``Past``.
    """

    bus: Bus
    state: RunState
    shards: int | None = None
    client_id: str = "streamrl-live"
    availability: BrokerAvailability = field(default_factory=BrokerAvailability)
    without_prefetch: Bus | None = None
    pace_s: Callable[[], float] = lambda: OFTEN_S
    past: Past = field(default_factory=lambda: RECENT)
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    _ends: dict[TopicPartition, int] = field(init=False, default_factory=dict)
    _followed: set[str] = field(init=False, default_factory=set)
    _asked_at: float = field(init=False, default=math.inf)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the state up to date.

        Consumes: the topics of ``past``, from there on, and the ends of others. Produces: nothing.
        Waits for: its pace, new records.
        On failure: what retention deleted is passed over, and a topic that was made anew is followed from its end on;
            while no broker answers, that is told once, and asked again.
        On stop: returns at once; ``read_to_end`` reads what is left.
        """
        # A poll may wait for seconds; cancelled, it leaves the positions as they were, so nothing is lost.
        following, stopping = asyncio.create_task(self._follow_always()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            await end_tasks([following, stopping])

    async def _follow_always(self) -> NoReturn:
        while True:
            self._asked_at = time.monotonic()
            try:
                if not self.positions:
                    await self._catch_up()
                await self._begin_new_topics()
                await self._follow()
            except DataLossRefused as error:
                # A hole that begins where we stand was deleted by retention; another one is a topic made anew, read
                # from its end.
                self._ends.clear()
                for topic, partition, begin, end in error.holes:
                    place = TopicPartition(topic, partition)
                    self.positions[place] = end if self.positions[place] == begin else begin
            except BusUnavailable as error:
                self.availability.report_silence(self.client_id, error, self._asked_at)
                await asyncio.sleep(RETRY_S)

    async def read_to_end(self) -> None:
        """Read what is on the topics now, once ``run`` has returned: for who wants nothing left out.

        Raises:
            BusUnavailable: no broker answers.
        """
        if not self.positions:
            await self._catch_up()
        history, records = BusHistory(self.bus, self.client_id), list[Record]()
        for topic in self.past:
            name = topic.full_name(self.state.run)
            extents = await history.extents(name)
            ranges = {tp.partition: Extent(self.positions.get(tp, 0), held.end) for tp, held in extents.items()}
            records += [record async for record in history.records(name, ranges)]
            self.positions |= {tp: held.end for tp, held in extents.items()}
        # Before the lag is asked for: a broker that goes away now costs the lag only.
        self.state.observe_records(sorted(records, key=lambda each: each.timestamp))
        trajectories = await history.extents(TRAJECTORIES.full_name(self.state.run))
        self._note_ends({tp: held.end for tp, held in trajectories.items()})

    async def _catch_up(self) -> None:
        """Read the recent past, in the order of its times; topics that are read whole are followed from the first."""
        history, records = BusHistory(self.bus, self.client_id), list[Record]()
        positions: dict[TopicPartition, int] = {}
        for topic in {**dict.fromkeys(COUNTED, 0), **self.past}:
            name, most = topic.full_name(self.state.run), self.past.get(topic, 0)
            extents = await history.extents(name)
            self._note_ends({tp: held.end for tp, held in extents.items()})
            if topic is DEAD_LETTERS:
                self.state.refusals.dead_letters = sum(held.end - held.first for held in extents.values())
            if most is None:
                positions |= {tp: held.first for tp, held in extents.items()}
                continue
            positions |= {tp: held.end for tp, held in extents.items()}
            share = most // max(1, len(extents))
            ranges = {tp.partition: Extent(max(held.first, held.end - share), held.end) for tp, held in extents.items()}
            if share:
                cut = {tp.partition for tp, held in extents.items() if ranges[tp.partition].first > held.first}
                records += _since_all_are_whole([record async for record in history.records(name, ranges)], cut)
        # All are looked into, unlike what comes later: a display begins with the newest trajectories.
        for record in sorted(records, key=lambda each: each.timestamp):
            self.state.observe_record(record)
        self.positions = positions

    @property
    def _new_topics(self) -> set[str]:
        """Those that parts of the state want, and that are not read yet."""
        return {topic for part in self.state.parts for topic in part.topics} - self._followed

    async def _begin_new_topics(self) -> None:
        """Read the newest records of further topics, to go on behind them."""
        history = BusHistory(self.bus, self.client_id)
        for topic in sorted(self._new_topics):
            extents = await history.extents(topic)
            share = {tp.partition: Extent(max(held.first, held.end - FEW), held.end) for tp, held in extents.items()}
            for record in [record async for record in history.records(topic, share)]:
                self.state.observe_record(record)
            self.positions |= {tp: held.end for tp, held in extents.items()}
            self._followed.add(topic)

    async def _follow(self) -> None:
        """Until a part of the state wants a topic that is not read yet."""
        topics = sorted({tp.topic for tp in self.positions})
        bus, start = self.without_prefetch or self.bus, dict(self.positions)
        subscription = await bus.subscribe(topics, client_id=self.client_id, start=start)
        self._asked_at = math.inf  # from here on every poll asks anew
        names = {topic.full_name(self.state.run) for topic in self.past} | self._followed
        read = {tp for tp in start if tp.topic in names}
        # Nothing is fetched between two looks, so that whoever looks costs the broker next to nothing.
        subscription.pause(start)
        self.availability.report_answer(self.client_id)
        ends = asyncio.create_task(self._watch_ends(subscription))
        try:
            while True:
                subscription.resume(read)
                records = await _gathered(subscription)
                subscription.pause(read)
                for record in records:
                    self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
                self._note_ends({tp: self.positions[tp] for tp in read})
                self.state.observe_records(sorted(records, key=lambda each: each.timestamp))
                # A full batch means that more is there: it is read at once, so that a busy topic is caught up with.
                if len(records) < MAX_RECORDS:
                    self.state.read_at = time.time()
                    if self._new_topics:
                        return
                    await asyncio.sleep(self.pace_s())
        finally:
            await end_tasks([ends])
            await subscription.close()

    async def _watch_ends(self, subscription: Subscription) -> None:
        refused = 0
        while True:
            asked_at = time.monotonic()
            try:
                self._note_ends(await subscription.end_offsets())
                refused = 0
                self.availability.report_answer(self.client_id)
            except BusUnavailable as error:
                self.availability.report_silence(self.client_id, error, asked_at)
            except (BrokerError, BusError) as error:
                refused += 1
                if refused > 1:  # a broker that has just started refuses once
                    log.warning("the ends of the topics are not known now", error=str(error))
            await asyncio.sleep(max(ENDS_EVERY_S, 2 * self.pace_s()))

    def _note_ends(self, ends: Mapping[TopicPartition, int]) -> None:
        """Of any topics; those of the trajectories tell the lag."""
        topic = TRAJECTORIES.full_name(self.state.run)
        # An answer may be older than what was read meanwhile.
        self._ends |= {tp: max(end, self._ends.get(tp, 0)) for tp, end in ends.items() if tp.topic == topic}
        if self.shards is not None:
            self.state.trajectories.ends = ends_by_bucket(self._ends, self.shards)


def _since_all_are_whole(records: list[Record], cut: Collection[int]) -> list[Record]:
    """Without those that are older than what was read of every partition that was cut.

    The last records of a length bucket that is hardly filled any more are of long ago: beside the newest of the others
    they would tell of a past that never was.
    """
    oldest: dict[int, float] = {}
    for record in records:
        if record.partition in cut:
            oldest[record.partition] = min(record.timestamp, oldest.get(record.partition, record.timestamp))
    since = max(oldest.values(), default=0.0)
    return [record for record in records if record.timestamp >= since]


async def _gathered(subscription: Subscription) -> list[Record]:
    """What came since the last read, but at most about ``MAX_RECORDS``."""
    records = await subscription.poll(max_records=MAX_RECORDS, timeout_s=POLL_S)
    for _ in range(MORE_POLLS):
        more = await subscription.poll(max_records=MAX_RECORDS, timeout_s=GATHER_S)
        records += more
        if not more or len(records) >= MAX_RECORDS:
            break
    return records


def ends_by_bucket(ends: Mapping[TopicPartition, int], shards: int) -> dict[int, int]:
    """Sums over the partitions of each length bucket."""
    found: dict[int, int] = {}
    for tp, end in ends.items():
        bucket = tp.partition // shards
        found[bucket] = found.get(bucket, 0) + end
    return dict(sorted(found.items()))
