"""Follows a run's topics and folds them into a live state. Reads only; joins no group and commits nothing."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import structlog

from bus.history import BusHistory, Extent
from bus.kafka.connection import Outage
from bus.port import Bus, Record, Subscription, TopicPartition
from observability.run_state.pace import OFTEN_S
from observability.run_state.state import LiveState
from schemas.errors import BrokerError, BusError, BusUnavailable, DataLossRefused
from schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic

log = structlog.get_logger()

POLL_S = 2.0
MORE_POLLS, GATHER_S = 3, 0.05
"""Brokers answer one by one: after the first answer there are so many polls for the others', which wait so long."""
RETRY_S = 2.0
ENDS_EVERY_S = 5.0
MAX_RECORDS = 2000
PAST: dict[Topic, int] = {CONTROL: 1 << 40, STEPS: 4000, HEARTBEATS: 4000, SKIPS: 4000, TRAJECTORIES: 1500}
"""Offsets of the past that are read, over all partitions of a topic; of the others only what comes. Orders are counted
by their ends, not read: they have more partitions than all the others, and each makes every read dearer."""
FOLLOWED = (*PAST, WORK_ORDERS, DEAD_LETTERS)


class Committed(Protocol):
    """The trainer's next offsets, for the lag."""

    async def ask(self) -> Mapping[TopicPartition, int]:
        """Ask the broker."""
        ...

    async def close(self) -> None:
        """Release; idempotent, and may be asked again."""
        ...


@dataclass
class LiveFeed:
    """``state`` is complete up to the last poll. ``shards`` None: partitions cannot be told by bucket. ``outage``: told
    of, and shared with what else reads from ``bus``. ``unhurried``: the same bus, which does nothing between two reads;
    what comes is read from it, if there is one. ``pace_s``: seconds between two reads.
    """

    bus: Bus
    state: LiveState
    shards: int | None = None
    committed: Committed | None = None
    client_id: str = "streamrl-live"
    outage: Outage = field(default_factory=Outage)
    unhurried: Bus | None = None
    pace_s: Callable[[], float] = lambda: OFTEN_S
    positions: dict[TopicPartition, int] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the state up to date.

        Consumes: all topics but tokens and commands, from the recent past on. Produces: nothing.
        Waits for: its pace, new records.
        On failure: what retention deleted is passed over, and a topic that was made anew is followed from its end on;
            while no broker answers, that is told once, and asked again.
        On stop: returns at once.
        """
        following, stopping = asyncio.create_task(self._follow_always()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            following.cancel()
            stopping.cancel()
            await asyncio.gather(following, stopping, return_exceptions=True)

    async def _follow_always(self) -> NoReturn:
        while True:
            try:
                if not self.positions:
                    await self._catch_up()
                await self._follow()
            except DataLossRefused as error:
                for topic, partition, begin, end in error.holes:
                    place = TopicPartition(topic, partition)
                    self.positions[place] = end if self.positions[place] == begin else begin
            except BusUnavailable as error:
                self.outage.begin(self.client_id, error)
                await asyncio.sleep(RETRY_S)

    async def _catch_up(self) -> None:
        """Read the recent past, in the order of its times."""
        history = BusHistory(self.bus, self.client_id)
        past: list[Record] = []
        positions: dict[TopicPartition, int] = {}
        for topic in FOLLOWED:
            extents = await history.extents(topic.full_name(self.state.run))
            positions |= {tp: held.end for tp, held in extents.items()}
            most = PAST.get(topic, 0) // max(1, len(extents))
            ranges = {tp.partition: Extent(max(held.first, held.end - most), held.end) for tp, held in extents.items()}
            if most:
                past += [record async for record in history.records(topic.full_name(self.state.run), ranges)]
        for record in sorted(past, key=lambda each: each.timestamp):
            self.state.take(record)
        self.positions = positions

    async def _follow(self) -> NoReturn:
        topics = sorted({tp.topic for tp in self.positions})
        bus, start = self.unhurried or self.bus, dict(self.positions)
        subscription = await bus.subscribe(topics, client_id=self.client_id, start=start)
        read = {tp for tp in start if tp.topic != WORK_ORDERS.full_name(self.state.run)}
        subscription.pause(start)
        self.outage.end(self.client_id)
        ends = asyncio.create_task(self._watch_ends(subscription))
        try:
            while True:
                subscription.resume(read)
                records = await _gathered(subscription)
                subscription.pause(read)
                for record in records:
                    self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
                self.state.take_all(sorted(records, key=lambda each: each.timestamp))
                if len(records) < MAX_RECORDS:
                    self.state.read_at = time.time()
                    await asyncio.sleep(self.pace_s())
        finally:
            ends.cancel()
            await asyncio.gather(ends, return_exceptions=True)
            await subscription.close()

    async def _watch_ends(self, subscription: Subscription) -> None:
        try:
            while True:
                try:
                    await self._ask_for_ends(subscription)
                    self.outage.end(self.client_id)
                except BusUnavailable as error:
                    self.outage.begin(self.client_id, error)
                except (BrokerError, BusError) as error:
                    log.warning("lag is not known now", error=str(error))
                await asyncio.sleep(max(ENDS_EVERY_S, 2 * self.pace_s()))
        finally:
            if self.committed is not None:
                await self.committed.close()

    async def _ask_for_ends(self, subscription: Subscription) -> None:
        ends = await subscription.end_offsets()
        orders = {tp: end for tp, end in ends.items() if tp.topic == WORK_ORDERS.full_name(self.state.run)}
        self.state.ordered(sum(max(0, end - self.positions[tp]) for tp, end in orders.items()), time.time())
        self.positions |= orders
        if self.committed is not None and self.shards is not None:
            topic, finished = TRAJECTORIES.full_name(self.state.run), await self.committed.ask()
            self.state.unfinished = unfinished_by_bucket(topic, ends, finished, self.shards)


async def _gathered(subscription: Subscription) -> list[Record]:
    """What came since the last read, but at most about ``MAX_RECORDS``."""
    records = await subscription.poll(max_records=MAX_RECORDS, timeout_s=POLL_S)
    for _ in range(MORE_POLLS):
        more = await subscription.poll(max_records=MAX_RECORDS, timeout_s=GATHER_S)
        records += more
        if not more or len(records) >= MAX_RECORDS:
            break
    return records


def unfinished_by_bucket(
    topic: str, ends: Mapping[TopicPartition, int], finished: Mapping[TopicPartition, int], shards: int
) -> dict[int, int]:
    """Offsets between what the trainer finished and the end, by length bucket."""
    found: dict[int, int] = {}
    for tp, end in ends.items():
        if tp.topic == topic:
            bucket = tp.partition // shards
            found[bucket] = found.get(bucket, 0) + max(0, end - finished.get(tp, 0))
    return found
