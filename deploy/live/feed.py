"""Follows a run's topics and folds them into a live state. Reads only; joins no group and commits nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from deploy.bus.client.outage import Outage
from deploy.inspection.bus_history import BusHistory
from deploy.live.state import LiveState
from schemas.errors import BrokerError, BusError, BusUnavailable, DataLossRefused
from schemas.ports.bus import Bus, Record, Subscription, TopicPartition
from schemas.ports.history import Extent
from schemas.wire.topics import (
    CONTROL,
    DEAD_LETTERS,
    HEARTBEATS,
    SKIPS,
    STEPS,
    TRAJECTORIES,
    WORK_ORDERS,
    Topic,
)

log = structlog.get_logger()

POLL_S = 0.25
RETRY_S = 2.0
LAG_EVERY_S = 5.0
MAX_RECORDS = 2000
PAST: dict[Topic, int] = {CONTROL: 1 << 40, STEPS: 4000, HEARTBEATS: 4000, SKIPS: 4000, TRAJECTORIES: 1500}
"""Offsets of the past that are read, over all partitions of a topic; of the others only what comes."""
FOLLOWED = (*PAST, WORK_ORDERS, DEAD_LETTERS)

Committed = Callable[[], Awaitable[Mapping[TopicPartition, int]]]
"""Asks the broker for the trainer's next offsets, for the lag."""


@dataclass
class LiveFeed:
    """``state`` is complete up to the last poll. ``shards`` None: partitions cannot be told by bucket. ``outage``: told
    of, and shared with what else reads from ``bus``. ``unhurried``: the same bus, whose reads bring much at once; what
    comes is read from it, if there is one.
    """

    bus: Bus
    state: LiveState
    shards: int | None = None
    committed: Committed | None = None
    client_id: str = "streamrl-live"
    outage: Outage = field(default_factory=Outage)
    unhurried: Bus | None = None
    positions: dict[TopicPartition, int] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the state up to date.

        Consumes: all topics but tokens and commands, from the recent past on. Produces: nothing.
        Waits for: new records.
        On failure: what retention deleted is passed over, and a topic that was made anew is followed from its end on;
            while no broker answers, that is told once, and asked again.
        On stop: returns within one poll.
        """
        while not stop.is_set():
            try:
                if not self.positions:
                    await self._catch_up()
                await self._follow(stop)
            except DataLossRefused as error:
                for topic, partition, begin, end in error.holes:
                    place = TopicPartition(topic, partition)
                    self.positions[place] = end if self.positions[place] == begin else begin
            except BusUnavailable as error:
                self.outage.begin(self.client_id, error)
                await _stopped_within(stop, RETRY_S)

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

    async def _follow(self, stop: asyncio.Event) -> None:
        topics = sorted({tp.topic for tp in self.positions})
        bus, start = self.unhurried or self.bus, dict(self.positions)
        subscription = await bus.subscribe(topics, client_id=self.client_id, start=start)
        self.outage.end(self.client_id)
        lags = asyncio.create_task(self._watch_lags(subscription)) if self.committed and self.shards else None
        try:
            while not stop.is_set():
                records = await subscription.poll(max_records=MAX_RECORDS, timeout_s=POLL_S)
                for record in sorted(records, key=lambda each: each.timestamp):
                    self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
                    self.state.take(record)
        finally:
            if lags is not None:
                lags.cancel()
                await asyncio.gather(lags, return_exceptions=True)
            await subscription.close()

    async def _watch_lags(self, subscription: Subscription) -> None:
        assert self.committed is not None
        assert self.shards is not None
        topic = TRAJECTORIES.full_name(self.state.run)
        while True:
            try:
                ends, finished = await subscription.end_offsets(), await self.committed()
                self.outage.end(self.client_id)
                self.state.unfinished = unfinished_by_bucket(topic, ends, finished, self.shards)
            except BusUnavailable as error:
                self.outage.begin(self.client_id, error)
            except (BrokerError, BusError) as error:
                log.warning("lag is not known now", error=str(error))
            await asyncio.sleep(LAG_EVERY_S)


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


async def _stopped_within(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
