"""A run's topics read from a bus, without taking part: no group, no commit, no write. Knows no message.

Invariants, each with a test of its name:
- reading_ends_where_the_log_ended: at the offsets there were when it began, also when transaction markers stand last;
- only_what_was_asked_for_is_delivered: nothing outside the named ranges, each partition ascending.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from schemas.errors import BusError, BusUnavailable, DataLossRefused, TopicMissing
from schemas.ports.bus import Bus, Record, Subscription, TopicPartition
from schemas.ports.history import Extent

POLL_S = 0.25
MAX_RECORDS = 2000
STALL_S = 60.0
NEIGHBOURS = 2000
"""Places no further apart than this are read in one go; a further subscription costs about as much."""


@dataclass(frozen=True)
class BusHistory:
    """``schemas.ports.history.History`` over any bus. Holds no connection between calls."""

    bus: Bus
    client_id: str = "history"

    async def extents(self, topic: str) -> dict[TopicPartition, Extent]:
        """What is held of each partition of a topic (full name); empty if there is no such topic.

        Raises:
            BusUnavailable: no broker answers.
        """
        try:
            subscription = await self._subscribe(topic, None)
        except TopicMissing:
            return {}
        try:
            return await _extents(subscription)
        finally:
            await subscription.close()

    async def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncIterator[Record]:
        """All records of the topic up to its present ends, or only those within the offsets named by partition.

        Whoever stops reading before the end closes the iterator (``contextlib.aclosing``).

        Raises:
            BusUnavailable: no broker answers, or it delivers nothing for a minute though there is more.
            DataLossRefused: retention deleted records while they were about to be read.
        """
        begun = await self._begin(topic, ranges)
        if begun is None:
            return
        subscription, ends = begun
        try:
            async for record in _read_until(subscription, ends):
                yield record
        finally:
            await subscription.close()

    async def fetch(self, topic: str, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """The records at these partitions and offsets; places that hold none are left out.

        Raises:
            BusUnavailable: see ``records``.
        """
        wanted = set(places)
        found: dict[tuple[int, int], Record] = {}
        for ranges in _rounds(wanted):
            async for record in self.records(topic, ranges):
                if (record.partition, record.offset) in wanted:
                    found[record.partition, record.offset] = record
        return found

    async def close(self) -> None:
        """Nothing is held."""

    async def _begin(
        self, topic: str, ranges: Mapping[int, Extent] | None
    ) -> tuple[Subscription, dict[TopicPartition, int]] | None:
        """A subscription at the first wanted offsets, and where to end; none if there is nothing to read."""
        wanted = None if ranges is None else {p: extent for p, extent in ranges.items() if extent.first < extent.end}
        if wanted == {}:
            return None
        try:
            subscription = await self._subscribe(topic, wanted)
        except TopicMissing:
            return None
        except BusUnavailable:
            raise
        except (DataLossRefused, BusError):
            if wanted is None:
                raise
            held = {tp.partition: extent for tp, extent in (await self.extents(topic)).items()}
            wanted = {p: _common(extent, held[p]) for p, extent in wanted.items() if p in held}
            wanted = {p: extent for p, extent in wanted.items() if extent.first < extent.end}
            if not wanted:
                return None
            subscription = await self._subscribe(topic, wanted)
        ends = await subscription.end_offsets()
        if wanted is not None:
            ends = {tp: min(end, wanted[tp.partition].end) for tp, end in ends.items()}
        return subscription, ends

    async def _subscribe(self, topic: str, ranges: Mapping[int, Extent] | None) -> Subscription:
        if ranges is None:
            return await self.bus.subscribe([topic], client_id=self.client_id)
        start = {TopicPartition(topic, partition): extent.first for partition, extent in ranges.items()}
        return await self.bus.subscribe([topic], client_id=self.client_id, start=start, partitions=ranges)


async def _extents(subscription: Subscription) -> dict[TopicPartition, Extent]:
    first, end = await subscription.beginning_offsets(), await subscription.end_offsets()
    return {tp: Extent(first[tp], max(first[tp], end[tp])) for tp in sorted(end)}


async def _read_until(subscription: Subscription, ends: dict[TopicPartition, int]) -> AsyncIterator[Record]:
    """Deliver what lies before the ends. The subscription's own positions pass markers that are never delivered."""
    clock = asyncio.get_running_loop().time
    unread, heard_at = dict(ends), clock()
    while unread:
        records = await subscription.poll(max_records=MAX_RECORDS, timeout_s=POLL_S)
        for record in records:
            if record.offset < ends.get(TopicPartition(record.topic, record.partition), 0):
                yield record
        positions = await subscription.positions()
        finished = [tp for tp, end in unread.items() if positions[tp] >= end]
        subscription.pause(finished)
        for tp in finished:
            del unread[tp]
        if records or finished:
            heard_at = clock()
        elif clock() - heard_at > STALL_S:
            where = ", ".join(f"{tp.topic}/{tp.partition} at {positions[tp]} of {end}" for tp, end in unread.items())
            raise BusUnavailable(f"expected records up to the end of the log, got none in {STALL_S:.0f} s: {where}")


def _common(one: Extent, other: Extent) -> Extent:
    return Extent(max(one.first, other.first), min(one.end, other.end))


def _rounds(places: Iterable[tuple[int, int]]) -> list[dict[int, Extent]]:
    """Ranges that hold all places, as few rounds of at most one range a partition as neighbourhood allows."""
    stretches: dict[int, list[Extent]] = {}
    for partition, offset in sorted(places):
        known = stretches.setdefault(partition, [])
        if known and offset - known[-1].end < NEIGHBOURS:
            known[-1] = Extent(known[-1].first, offset + 1)
        else:
            known.append(Extent(offset, offset + 1))
    count = max((len(known) for known in stretches.values()), default=0)
    return [{p: known[number] for p, known in stretches.items() if number < len(known)} for number in range(count)]
