"""The records of a topic from a start on, and those that come. Knows no message and prints nothing.

Invariant following_survives: what retention deletes, and a broker that goes away for a while, are told and passed over.
"""

import asyncio
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from deploy.inspection.bus_history import BusHistory
from deploy.surveys.tailing.starts import Extents, Last, OffsetsSince, Start, first_offsets
from schemas.errors import BusUnavailable, DataLossRefused, TopicMissing
from schemas.ports.bus import Bus, Record, TopicPartition
from schemas.ports.history import Extent

POLL_S = 0.5
RETRY_S = 2.0
MARKERS_TOO = 2
"""Offsets per record, at first: in a transaction of one record, every second one is its end."""


@dataclass(frozen=True)
class Following:
    """``partitions`` None: all. ``tell``: where notes go."""

    bus: Bus
    topic: str
    offsets_since: OffsetsSince
    tell: Callable[[str], None]
    partitions: frozenset[int] | None = None
    client_id: str = "streamrl-tail"

    async def records(self, start: Start, *, follow: bool) -> AsyncGenerator[Record, None]:
        """What is there, oldest first as far as polls tell, then what comes if asked to follow.

        Raises:
            TopicMissing: there is no such topic, or it has not these partitions.
            BusUnavailable: no broker answers at the beginning.
        """
        history = BusHistory(self.bus, self.client_id)
        extents = await self._extents(history)
        if isinstance(start, Last):
            for record in await newest_records(history, self.topic, extents, start.count):
                yield record
            following = {tp: held.end for tp, held in extents.items()}
        else:
            following = await first_offsets(start, extents, self.offsets_since)
            if not follow:
                ranges = {tp.partition: Extent(following[tp], held.end) for tp, held in extents.items()}
                async with aclosing(_closable(history.records(self.topic, ranges))) as held_records:
                    async for record in held_records:
                        yield record
        while follow:
            async with aclosing(self._coming(following)) as coming:
                async for record in coming:
                    following[TopicPartition(record.topic, record.partition)] = record.offset + 1
                    yield record
            await asyncio.sleep(RETRY_S)

    async def _extents(self, history: BusHistory) -> Extents:
        extents = await history.extents(self.topic)
        chosen = {
            tp: held for tp, held in extents.items() if self.partitions is None or tp.partition in self.partitions
        }
        if not chosen:
            raise TopicMissing(f"expected topic {self.topic}, which has {len(extents)} partitions")
        return chosen

    async def _coming(self, positions: dict[TopicPartition, int]) -> AsyncGenerator[Record, None]:
        """What comes behind the positions, until something has to be begun anew."""
        try:
            subscription = await self.bus.subscribe(
                [self.topic],
                client_id=self.client_id,
                start=dict(positions),
                partitions=[tp.partition for tp in positions],
            )
        except (DataLossRefused, BusUnavailable) as error:
            self._pass_over(error, positions)
            return
        try:
            while True:
                for record in sorted(await subscription.poll(timeout_s=POLL_S), key=lambda each: each.timestamp):
                    yield record
        except (DataLossRefused, BusUnavailable) as error:
            self._pass_over(error, positions)
        finally:
            await subscription.close()

    def _pass_over(self, error: DataLossRefused | BusUnavailable, positions: dict[TopicPartition, int]) -> None:
        if not isinstance(error, DataLossRefused):
            self.tell(f"waiting for the broker: {error}")
            return
        for topic, partition, first, end in error.holes:
            tp = TopicPartition(topic, partition)
            recreated = positions.get(tp, 0) > first
            positions[tp] = 0 if recreated else end
            self.tell(
                f"{topic}[{partition}]: " + ("it begins anew" if recreated else f"{first} to {end - 1} were deleted")
            )


def _closable(records: AsyncIterator[Record]) -> AsyncGenerator[Record, None]:
    assert isinstance(records, AsyncGenerator), "written as a generator"
    return records


async def newest_records(history: BusHistory, topic: str, extents: Extents, count: int) -> list[Record]:
    """The newest records by time; reads further back until there are enough, or no more."""
    span = MARKERS_TOO * count
    while count:
        ranges = {tp.partition: Extent(max(held.first, held.end - span), held.end) for tp, held in extents.items()}
        newest = _Newest(count)
        async for record in history.records(topic, ranges):
            newest.add(record)
        reached = all(ranges[tp.partition].first == held.first for tp, held in extents.items())
        if reached or len(newest.held) == count:
            return list(newest.in_order())
        span *= 8
    return []


class _Newest:
    """Keeps the newest few of many records."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.held: list[tuple[float, int, int, Record]] = []

    def add(self, record: Record) -> None:
        item = (record.timestamp, record.partition, record.offset, record)
        if len(self.held) < self._count:
            heapq.heappush(self.held, item)
        else:
            heapq.heappushpop(self.held, item)

    def in_order(self) -> Iterator[Record]:
        return (item[-1] for item in sorted(self.held))


def since_by_reading(bus: Bus) -> OffsetsSince:
    """For a bus that cannot be asked for offsets by time: looks at every record."""

    async def offsets_since(extents: Extents, moment: float) -> Mapping[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        for topic in {tp.topic for tp in extents}:
            async for record in BusHistory(bus).records(topic):
                tp = TopicPartition(record.topic, record.partition)
                if record.timestamp >= moment:
                    found.setdefault(tp, record.offset)
        return found

    return offsets_since
