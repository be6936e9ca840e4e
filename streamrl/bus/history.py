"""Reads a run's topics passively: it joins no group, commits nothing and writes nothing. Knows no message.

Invariants, each with a test of its name:
- reading_stops_at_the_ends_seen_at_the_start: even if transaction markers, which are never delivered, come last;
- only_requested_offsets_are_delivered: no record outside the named ranges, and each partition in ascending order;
- a_kept_connection_never_changes_an_answer: see ``ConnectedHistory``.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from streamrl.bus.port import Bus, Position, Record, Subscription, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused, TopicMissing

POLL_S = 0.25
MAX_RECORDS = 2000
STALL_S = 60.0
"""Seconds without a record, although there are more, after which reading fails; long compared to a broker's restart."""
NEIGHBOURS = 2000
"""Offsets that are at most this far apart are read together; another subscription costs about as much."""
FEW, REOPEN_S, SOON_S = 2000, 300.0, 1.0
"""For a kept connection: most records of a request, seconds until it is reopened, and seconds that may pass without a
record."""
NEAR_NEIGHBOURS = 200
"""``NEIGHBOURS`` for a caller that waits for the answer.

It is smaller, because records in between may be large, and because the samples of a group are closer together.
"""


class Extent(NamedTuple):
    """Offsets of a partition: the first one held and the one after the last."""

    first: int
    end: int


class History(Protocol):
    """Reads topics of one run by offset, up to their ends at the time of the call. Writes and commits nothing."""

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        """The offsets held of each partition of topics (full names), asked in this order; missing topics have none."""
        ...

    def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncIterator[Record]:
        """All records of the topic, or only those in ``ranges`` (by partition number); ascending per partition."""
        ...

    def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncGenerator[Record, None]:
        """The records of several topics within these offsets; ascending per partition, partitions in any order.

        A caller that stops before the end closes the iterator (``contextlib.aclosing``).
        """
        ...

    async def fetch(self, topic: str, positions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """The records at these (partition, offset) pairs; pairs without a record are left out."""
        ...

    async def fetch_all(self, positions: Iterable[Position]) -> dict[Position, Record]:
        """The same for several topics at once; for a few records that are far apart."""
        ...

    async def close(self) -> None:
        """Release resources; idempotent."""
        ...


@dataclass(frozen=True)
class BusHistory:
    """``bus.history.History`` over any bus. Holds no connection between calls."""

    bus: Bus
    client_id: str = "history"

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        """The offsets held of each partition of topics (full names), asked in this order; missing topics have none.

        Raises:
            BusUnavailable: no broker answers.
        """
        try:
            subscription = await self.bus.subscribe(topics, client_id=self.client_id)
        except TopicMissing:
            # Then the topics are asked one by one, so that one missing topic does not hide the others.
            each = [await self.extents(topic) for topic in topics] if len(topics) > 1 else []
            return {tp: extent for found in each for tp, extent in found.items()}
        try:
            # Only offsets are wanted. Without the pause, the subscription would fetch records in the background.
            subscription.pause(subscription.partitions())
            found: dict[TopicPartition, Extent] = {}
            for topic in topics:
                found |= await self._extents_of(topic, subscription)
            return found
        finally:
            await subscription.close()

    async def _extents_of(self, topic: str, subscription: Subscription) -> dict[TopicPartition, Extent]:
        first, end = await subscription.beginning_offsets(), await subscription.end_offsets()
        # Two requests at two moments: if the topic changed in between, an extent is empty, never negative.
        return {tp: Extent(first[tp], max(first[tp], end[tp])) for tp in sorted(end) if tp.topic == topic}

    def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncGenerator[Record, None]:
        """All records of the topic up to its present ends, or only those in ``ranges`` (by partition number).

        A caller that stops before the end closes the iterator (``contextlib.aclosing``).

        Raises:
            BusUnavailable: no broker answers, or it delivers nothing for a minute although there are more records.
            DataLossRefused: retention deleted records just before they were read.
        """
        if ranges is None:
            return _read(partial(self._open_whole, topic))
        return self.within({TopicPartition(topic, number): extent for number, extent in ranges.items()})

    def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncGenerator[Record, None]:
        """The records of several topics within these offsets; ascending per partition, partitions in any order.

        Raises:
            BusUnavailable: see ``records``.
            DataLossRefused: see ``records``.
        """
        return _read(partial(self._open_ranges, ranges))

    async def fetch(self, topic: str, positions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """The records at these (partition, offset) pairs; pairs without a record are left out.

        Raises:
            BusUnavailable: see ``records``.
        """
        found = await self._fetched({Position(topic, *position) for position in positions}, NEIGHBOURS)
        return {(partition, offset): record for (_, partition, offset), record in found.items()}

    async def fetch_all(self, positions: Iterable[Position]) -> dict[Position, Record]:
        """The same for several topics at once; for a few records that are far apart.

        Raises:
            BusUnavailable: see ``records``.
        """
        return await self._fetched(set(positions), NEAR_NEIGHBOURS)

    async def _fetched(self, wanted: set[Position], neighbours: int) -> dict[Position, Record]:
        found: dict[Position, Record] = {}
        for ranges in _rounds(wanted, neighbours):
            async for record in self.within(ranges):
                if (position := Position(record.topic, record.partition, record.offset)) in wanted:
                    found[position] = record
        return found

    async def close(self) -> None:
        """Do nothing: no connection is held."""

    async def _open_whole(self, topic: str) -> "_OpenReading | None":
        try:
            subscription = await self.bus.subscribe([topic], client_id=self.client_id)
        except TopicMissing:
            return None
        # The ends are read once. Otherwise the reading of a growing log might never end.
        return _OpenReading(subscription, await _ends_of(subscription))

    async def _open_ranges(self, ranges: Mapping[TopicPartition, Extent]) -> "_OpenReading | None":
        """A reading of the wanted offsets; if not all of them are held, of those that are."""
        wanted = _not_empty(ranges)
        if not wanted:
            return None
        try:
            subscription = await self._subscribe(wanted)
        except (DataLossRefused, BusError) as error:
            # A silent broker cannot say which offsets it holds. After any other refusal (deleted offsets, a missing
            # topic or partition), the request is narrowed to the offsets held. A second refusal goes to the caller.
            if isinstance(error, BusUnavailable) and not isinstance(error, TopicMissing):
                raise
            held = await self.extents(*{tp.topic for tp in wanted})
            wanted = _not_empty({tp: _common(extent, held[tp]) for tp, extent in wanted.items() if tp in held})
            if not wanted:
                return None
            subscription = await self._subscribe(wanted)
        ends = await _ends_of(subscription)
        return _OpenReading(subscription, {tp: min(end, wanted[tp].end) for tp, end in ends.items() if tp in wanted})

    async def _subscribe(self, wanted: Mapping[TopicPartition, Extent]) -> Subscription:
        topics, numbers = sorted({tp.topic for tp in wanted}), {tp.partition for tp in wanted}
        start = {tp: extent.first for tp, extent in wanted.items()}
        # The bus reads these partition numbers of all topics, so partitions that are not wanted are paused at once.
        subscription = await self.bus.subscribe(topics, client_id=self.client_id, start=start, partitions=numbers)
        subscription.pause(subscription.partitions() - start.keys())
        return subscription


class ConnectedHistory:
    """``bus.history.History`` that keeps one subscription open, for a caller that asks often and waits for answers.

    A question over the open subscription costs one or two requests; opening one costs a dozen. ``topics`` are those
    that are asked about often. Other topics and large ranges are read as ``BusHistory`` does. ``bus``: one whose
    subscriptions do nothing between two reads. ``bulk``: a bus with the usual fetch sizes, for large ranges.

    Invariant a_kept_connection_never_changes_an_answer: a question that fails over it is repeated over a new one.
    """

    def __init__(self, bus: Bus, topics: Iterable[str], client_id: str, bulk: Bus | None = None) -> None:
        self._bus = bus
        self._topics = frozenset(topics)
        self._client_id = client_id
        self._plain = BusHistory(bulk or bus, client_id)
        self._subscription: Subscription | None = None
        self._opened_at = 0.0
        # A subscription has one position a partition, so two questions at once would disturb each other.
        self._lock = asyncio.Lock()

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        """See ``BusHistory``."""
        if self._topics.issuperset(topics):
            async with self._lock:
                with suppress(BusError, DataLossRefused):
                    async with self._kept() as subscription:
                        places = {topic: number for number, topic in enumerate(topics)}
                        asked = [tp for tp in subscription.partitions() if tp.topic in places]
                        # Both at once, since the caller waits. An extent is never negative, in any order of answers.
                        first, end = await asyncio.gather(
                            subscription.beginning_offsets(asked), subscription.end_offsets(asked)
                        )
                        wanted = sorted(asked, key=lambda tp: (places[tp.topic], tp))
                        return {tp: Extent(first[tp], max(first[tp], end[tp])) for tp in wanted}
        return await self._plain.extents(*topics)

    def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncGenerator[Record, None]:
        """See ``BusHistory``."""
        return self._plain.records(topic, ranges)

    async def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncGenerator[Record, None]:
        """See ``BusHistory``."""
        if sum(max(0, extent.end - extent.first) for extent in ranges.values()) <= FEW:
            for record in await self._few(_not_empty(ranges)):
                yield record
            return
        async with aclosing(self._plain.within(ranges)) as records:
            async for record in records:
                yield record

    async def fetch(self, topic: str, positions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """See ``BusHistory``."""
        return await self._plain.fetch(topic, positions)

    async def fetch_all(self, positions: Iterable[Position]) -> dict[Position, Record]:
        """See ``BusHistory``."""
        wanted = set(positions)
        found: dict[Position, Record] = {}
        for ranges in _rounds(wanted, NEAR_NEIGHBOURS):
            for record in await self._few(ranges):
                if (position := Position(record.topic, record.partition, record.offset)) in wanted:
                    found[position] = record
        return found

    async def close(self) -> None:
        """Release the connection; idempotent. The next question opens a new one."""
        async with self._lock:
            await self._close_subscription()

    async def _few(self, ranges: Mapping[TopicPartition, Extent]) -> list[Record]:
        if not ranges:
            return []
        async with self._lock:
            with suppress(BusError, DataLossRefused):
                async with self._kept() as subscription:
                    if subscription.partitions() >= ranges.keys():
                        return await _read_few(subscription, ranges)
        async with aclosing(self._plain.within(ranges)) as records:
            return [record async for record in records]

    @asynccontextmanager
    async def _kept(self) -> AsyncIterator[Subscription]:
        """The kept subscription. It is closed after a failure or a cancellation in the middle of a question."""
        now = asyncio.get_running_loop().time()
        # Reopened now and then, to see added partitions.
        if self._subscription is not None and now - self._opened_at > REOPEN_S:
            await self._close_subscription()
        if self._subscription is None:
            self._subscription = await self._bus.subscribe(self._topics, client_id=self._client_id)
            self._subscription.pause(self._subscription.partitions())
            self._opened_at = now
        try:
            yield self._subscription
        except BaseException:
            await self._close_subscription()
            raise

    async def _close_subscription(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.close()


async def _read_few(subscription: Subscription, ranges: Mapping[TopicPartition, Extent]) -> list[Record]:
    subscription.seek({tp: extent.first for tp, extent in ranges.items()})
    subscription.resume(ranges)
    limits = {tp: extent.end for tp, extent in ranges.items()}
    # If the log ends before the limits, this fails after ``SOON_S``, and the caller reads again through ``BusHistory``.
    return [record async for records in _read_until(subscription, limits, SOON_S) for record in records]


class _OpenReading(NamedTuple):
    """A subscription at the start of a reading, and the offsets at which to stop. Other partitions are paused."""

    subscription: Subscription
    ends: dict[TopicPartition, int]


async def _ends_of(subscription: Subscription) -> dict[TopicPartition, int]:
    """The end offsets of a subscription that was just opened. If they are not available, it is closed."""
    try:
        return await subscription.end_offsets()
    except BaseException:  # a cancellation too: no other code can close it yet
        await subscription.close()
        raise


async def _read(open_reading: Callable[[], Awaitable[_OpenReading | None]]) -> AsyncGenerator[Record, None]:
    reading = await open_reading()
    if reading is None:
        return
    try:
        async for records in _read_until(*reading):
            for record in records:
                yield record
    finally:
        # A caller that stops early reaches this only by closing the generator; see the docstring of ``records``.
        await reading.subscription.close()


def _not_empty(ranges: Mapping[TopicPartition, Extent]) -> dict[TopicPartition, Extent]:
    return {tp: extent for tp, extent in ranges.items() if extent.first < extent.end}


async def _read_until(
    subscription: Subscription, ends: dict[TopicPartition, int], stall_s: float = STALL_S
) -> AsyncIterator[list[Record]]:
    """Deliver the records before the ends, poll by poll.

    The subscription's positions decide about the end, because they also pass markers that are never delivered.
    """
    clock = asyncio.get_running_loop().time
    unread, moved_at = dict(ends), clock()
    positions: Mapping[TopicPartition, int] = await subscription.positions(unread)
    bounds = {(tp.topic, tp.partition): end for tp, end in ends.items()}  # plain tuples: a ``TopicPartition`` is slow
    while unread:
        # Not more than there are: records beyond the ends would be unpacked for nothing.
        most = min(MAX_RECORDS, sum(max(1, end - positions[tp]) for tp, end in unread.items()))
        records = await subscription.poll(max_records=most, timeout_s=POLL_S)
        yield [record for record in records if record.offset < bounds.get((record.topic, record.partition), 0)]
        # The position decides and not the last record: transaction markers take offsets too and are not delivered.
        positions = await subscription.positions(unread)
        finished = [tp for tp, end in unread.items() if positions[tp] >= end]
        subscription.pause(finished)
        for tp in finished:
            del unread[tp]
        # Timed after the yield, so that the caller's time for these records does not count as a stall of the broker.
        if records or finished:
            moved_at = clock()
        elif clock() - moved_at > stall_s:
            where = ", ".join(f"{tp.topic}/{tp.partition} at {positions[tp]} of {end}" for tp, end in unread.items())
            raise BusUnavailable(f"expected records up to the end of the log, got none in {stall_s:.0f} s: {where}")


def _common(one: Extent, other: Extent) -> Extent:
    return Extent(max(one.first, other.first), min(one.end, other.end))


def _rounds(positions: Iterable[Position], neighbours: int) -> list[dict[TopicPartition, Extent]]:
    """Ranges that hold all positions, in rounds with at most one range per partition.

    Offsets within ``neighbours`` of each other share a range, so the rounds are as few as this allows.
    """
    ranges: dict[TopicPartition, list[Extent]] = {}
    # Ascending, so that an offset has to be compared only with the last range.
    for topic, partition, offset in sorted(positions):
        known = ranges.setdefault(TopicPartition(topic, partition), [])
        if known and offset - known[-1].end < neighbours:
            known[-1] = Extent(known[-1].first, offset + 1)
        else:
            known.append(Extent(offset, offset + 1))
    count = max((len(known) for known in ranges.values()), default=0)
    # A subscription has one position per partition, so a partition's second range has to wait for the next round.
    return [{tp: known[number] for tp, known in ranges.items() if number < len(known)} for number in range(count)]
