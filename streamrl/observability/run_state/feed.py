"""Follows a run's topics and folds them into a run's state. It only reads: it joins no group and commits nothing."""

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
"""Number of further polls, and seconds that each waits: brokers answer one by one."""
RETRY_S = 2.0
ENDS_EVERY_S = 5.0
MAX_RECORDS = 2000
FEW = 3
"""Number of past records to read of a further topic, since displays show only the newest."""
Past = Mapping[Topic, int | None]
"""The topics to read, each with the number of past records over all of its partitions; None: all of them."""
RECENT: Past = {CONTROL: 1 << 40, STEPS: 4000, HEARTBEATS: 4000, SKIPS: 4000, TRAJECTORIES: 1500, DEAD_LETTERS: 0}
"""For displays of a run: its recent past."""
WHOLE_RUN: Past = {CONTROL: None, STEPS: None, HEARTBEATS: None, SKIPS: None}
"""For the summary of a run: every step and every skip, and no trajectory."""


def with_evaluations(past: Past) -> Past:
    """``past`` with all evaluations, for a run that has them: other runs may have no such topic."""
    return {**past, EVALUATIONS: None}


COUNTED = (TRAJECTORIES,)
"""Topics whose ends are looked up even if they are not read. Orders are not counted: their topic has more partitions
than all others, and heartbeats tell how many orders workers got."""


@dataclass
class RunFeed:
    """Keeps ``state`` up to date with a run's topics; it is complete up to the last poll.

    ``shards``: partitions per length bucket; None: not known. ``availability`` is shared with the other readers of
    ``bus``. ``without_prefetch``: the same bus without reading ahead, used for new records if given. ``pace_s``: gives
    the seconds between two reads. ``past``: see ``Past``.
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

        Consumes: the topics of ``past``, from those positions on, and the ends of others. Produces: nothing.
        Waits for: its pace, new records.
        On failure: skips records that retention deleted, and follows a recreated topic from its end; while no broker
            answers, logs that once and tries again.
        On stop: returns at once; ``read_to_end`` reads the rest.
        """
        # A poll may wait for seconds. If it is cancelled, the positions stay as they were, so nothing is lost.
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
                # A hole that starts at our position was deleted by retention. Any other hole means that the topic was
                # recreated: it is read from its end.
                self._ends.clear()
                for topic, partition, start, end in error.holes:
                    place = TopicPartition(topic, partition)
                    self.positions[place] = end if self.positions[place] == start else start
            except BusUnavailable as error:
                self.availability.report_silence(self.client_id, error, self._asked_at)
                await asyncio.sleep(RETRY_S)

    async def read_to_end(self) -> None:
        """Read the topics to their present ends, after ``run`` has returned, so that nothing is missing.

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
        # Before looking up the lag: if the broker goes down now, only the lag is missing.
        self.state.observe_records(sorted(records, key=lambda each: each.timestamp))
        trajectories = await history.extents(TRAJECTORIES.full_name(self.state.run))
        self._note_ends({tp: held.end for tp, held in trajectories.items()})

    async def _catch_up(self) -> None:
        """Read the recent past, in the order of time stamps. Topics to be read whole are followed from the start."""
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
        # All records are decoded, unlike later ones: a display starts with the newest trajectories.
        for record in sorted(records, key=lambda each: each.timestamp):
            self.state.observe_record(record)
        self.positions = positions

    @property
    def _new_topics(self) -> set[str]:
        """Topics that parts of the state want and that are not read yet."""
        return {topic for part in self.state.parts for topic in part.topics} - self._followed

    async def _begin_new_topics(self) -> None:
        """Read the newest records of new topics, and follow the topics after them."""
        history = BusHistory(self.bus, self.client_id)
        for topic in sorted(self._new_topics):
            extents = await history.extents(topic)
            share = {tp.partition: Extent(max(held.first, held.end - FEW), held.end) for tp, held in extents.items()}
            for record in [record async for record in history.records(topic, share)]:
                self.state.observe_record(record)
            self.positions |= {tp: held.end for tp, held in extents.items()}
            self._followed.add(topic)

    async def _follow(self) -> None:
        """Follow the topics until a part of the state wants another one."""
        topics = sorted({tp.topic for tp in self.positions})
        bus, start = self.without_prefetch or self.bus, dict(self.positions)
        subscription = await bus.subscribe(topics, client_id=self.client_id, start=start)
        self._asked_at = math.inf  # from here on each poll is a new request
        names = {topic.full_name(self.state.run) for topic in self.past} | self._followed
        read = {tp for tp in start if tp.topic in names}
        # Nothing is fetched between two looks, so that a display costs the broker next to nothing.
        subscription.pause(start)
        self.availability.report_answer(self.client_id)
        ends = asyncio.create_task(self._watch_ends(subscription))
        try:
            while True:
                subscription.resume(read)
                records = await _gather(subscription)
                subscription.pause(read)
                for record in records:
                    self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
                self._note_ends({tp: self.positions[tp] for tp in read})
                self.state.observe_records(sorted(records, key=lambda each: each.timestamp))
                # After a full batch more records are waiting: they are read at once, to keep up with a busy topic.
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
                if refused > 1:  # a broker that has just started may refuse once
                    log.warning("the ends of the topics are not known now", error=str(error))
            await asyncio.sleep(max(ENDS_EVERY_S, 2 * self.pace_s()))

    def _note_ends(self, ends: Mapping[TopicPartition, int]) -> None:
        """Note the ends of partitions; those of the trajectories give the lag."""
        topic = TRAJECTORIES.full_name(self.state.run)
        # An answer may be older than records read in the meantime.
        self._ends |= {tp: max(end, self._ends.get(tp, 0)) for tp, end in ends.items() if tp.topic == topic}
        if self.shards is not None:
            self.state.note_ends(ends_by_bucket(self._ends, self.shards))


def _since_all_are_whole(records: list[Record], cut: Collection[int]) -> list[Record]:
    """The records from the time on for which every partition was read.

    ``cut``: partitions whose older records were not read. The last records of a rarely used length bucket are
    old. Next to the newest of the other buckets they would show a wrong past.
    """
    oldest: dict[int, float] = {}
    for record in records:
        if record.partition in cut:
            oldest[record.partition] = min(record.timestamp, oldest.get(record.partition, record.timestamp))
    since = max(oldest.values(), default=0.0)
    return [record for record in records if record.timestamp >= since]


async def _gather(subscription: Subscription) -> list[Record]:
    """The records since the last read, at most about ``MAX_RECORDS``."""
    records = await subscription.poll(max_records=MAX_RECORDS, timeout_s=POLL_S)
    for _ in range(MORE_POLLS):
        more = await subscription.poll(max_records=MAX_RECORDS, timeout_s=GATHER_S)
        records += more
        if not more or len(records) >= MAX_RECORDS:
            break
    return records


def ends_by_bucket(ends: Mapping[TopicPartition, int], shards: int) -> dict[int, int]:
    """The sum of the end offsets of each length bucket's partitions."""
    found: dict[int, int] = {}
    for tp, end in ends.items():
        bucket = tp.partition // shards
        found[bucket] = found.get(bucket, 0) + end
    return dict(sorted(found.items()))
