"""Reads assigned partitions of a Kafka broker. Decodes nothing: whatever is in a record, the next one can be read.

Invariants: positions are set by us before the first read, never by a committed offset; a read that is cancelled
loses no record; a consumer that stops reading while there is something to read is replaced by a new one, and if
that does not help, reading ends with an error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import CorruptRecordException, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from bus.kafka import records as record_batches
from bus.kafka.connection import Outage, client_options, discard, our_errors, partitions_seen_by, started
from bus.kafka.settings import KafkaSettings
from bus.port import Record, Start, TopicPartition
from schemas.errors import BusError, BusUnavailable, DataLossRefused

# Makes the consumers of one subscription, and asks the broker what it holds. Reads nothing.

AskOffsets = Callable[[list[KafkaPartition]], Awaitable[dict[KafkaPartition, int]]]
Positions = Mapping[TopicPartition, int]

FETCHER_LOOKS_MS, UNHURRIED_LOOKS_MS = 200, 10_000
"""aiokafka's fetcher looks at every partition so often even if nothing happens."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How consumers of one subscription are made. ``ahead``: they fetch more while the last records are dealt with."""

    settings: KafkaSettings
    client_id: str
    group_id: str | None
    outage: Outage = field(default_factory=Outage)
    ahead: bool = True

    async def assigned(self, partitions: Iterable[TopicPartition]) -> AIOKafkaConsumer:
        """A started consumer of these partitions, all paused at offset 0 so that it reads nothing yet."""
        settings = self.settings
        record_batches.install()
        consumer = AIOKafkaConsumer(
            **client_options(settings, self.client_id),
            group_id=self.group_id,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_wait_ms=settings.fetch_max_wait_ms,
            consumer_timeout_ms=FETCHER_LOOKS_MS if self.ahead else UNHURRIED_LOOKS_MS,
            fetch_min_bytes=settings.fetch_min_bytes,
            fetch_max_bytes=settings.fetch_max_bytes,
            max_partition_fetch_bytes=settings.max_partition_fetch_bytes,
        )
        await started(consumer, settings)
        names = [KafkaPartition(*tp) for tp in partitions]
        consumer.assign(names)
        for name in names:
            consumer.seek(name, 0)
        consumer.pause(*names)
        return consumer

    async def offsets(self, ask: AskOffsets, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The answer of ``beginning_offsets`` or ``end_offsets``, in time."""
        with our_errors(f"reading offsets as {self.client_id}"):
            async with asyncio.timeout(self.settings.connect_timeout_ms / 1000):
                found = await ask([KafkaPartition(*tp) for tp in partitions])
        return {TopicPartition(*tp): offset for tp, offset in found.items()}

    async def extents(
        self, consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]
    ) -> tuple[Positions, Positions]:
        """The oldest offsets held and the ones after the last, by partition."""
        wanted = tuple(partitions)
        first = await self.offsets(consumer.beginning_offsets, wanted)
        return first, await self.offsets(consumer.end_offsets, wanted)


def starting_positions(start: Start, first: Positions, end: Positions) -> Positions:
    """Where reading begins.

    Raises:
        DataLossRefused: named offsets are not on the broker (any more); it lists every one.
    """
    if start == "earliest":
        return first
    if start == "latest":
        return end
    positions = {tp: start.get(tp, oldest) for tp, oldest in first.items()}
    refuse_holes(positions, first, end)
    return positions


def refuse_holes(positions: Positions, first: Positions, end: Positions) -> None:
    """Refuse positions that the broker does not hold.

    Raises:
        DataLossRefused: it names the missing offsets: up to the oldest held; or, where the end is before the
            position, those between, which were on another broker or in a topic that was deleted and made again.
    """
    holes, told = [], []
    for tp, position in sorted(positions.items()):
        if not first[tp] <= position <= end[tp]:
            hole = (position, first[tp]) if position < first[tp] else (end[tp], position)
            holes.append((*tp, *hole))
            told.append(f"offset {position} of {tp.topic}/{tp.partition}, the broker holds {first[tp]} to {end[tp]}")
    if holes:
        raise DataLossRefused(
            f"expected to go on at {'; '.join(told)}: records were deleted before they were read (retention), or the "
            "topic was deleted and made again, or this is not the broker that they were written to",
            holes,
        )


# Tells when a reader is stuck: its position stands still while the end of the log is ahead. Pure; times are the
# caller's, in seconds. Invariants: a paused partition is never stuck; movement of a position clears that partition
# only; time in which the broker did not say that there is more to read does not count.


class StallWatch:
    """``timeout_s``: how long a partition may be behind without moving. ``rebuilds``: how often to try anew."""

    def __init__(self, timeout_s: float, rebuilds: int) -> None:
        self._timeout_s = timeout_s
        self._rebuilds = rebuilds
        self._positions: dict[TopicPartition, int] = {}
        self._quiet_since: dict[TopicPartition, float] = {}
        self._told_at: float | None = None
        self._behind_since: dict[TopicPartition, float] = {}
        self._rebuilt: dict[TopicPartition, int] = {}

    def note(self, now: float, positions: Positions, paused: Collection[TopicPartition]) -> None:
        """After every read: where it stands."""
        for tp, position in positions.items():
            if position != self._positions.get(tp) or tp in paused:
                self._positions[tp] = position
                self._quiet_since[tp] = now
                self._behind_since.pop(tp, None)
                if tp not in paused:
                    self._rebuilt.pop(tp, None)

    def should_ask(self, now: float) -> bool:
        """Whether it is time to ask the broker: something is quiet, or nothing was asked for long."""
        if self._told_at is None:
            self._told_at = now
        return now - self._told_at >= self._timeout_s or any(
            now - since >= self._timeout_s / 4 for since in self._quiet_since.values()
        )

    def told(self, now: float, ends: Positions) -> list[TopicPartition]:
        """The broker's ends; returns the partitions that are stuck, which are then counted as rebuilt."""
        self._told_at = now
        for tp, position in self._positions.items():
            self._quiet_since[tp] = now
            if ends[tp] > position:
                self._behind_since.setdefault(tp, now)
            else:
                self._behind_since.pop(tp, None)
        return [tp for tp, since in self._behind_since.items() if now - since >= self._timeout_s]

    def rebuilt(self, now: float, stuck: Collection[TopicPartition]) -> None:
        """A new consumer reads on from the same positions."""
        for tp in stuck:
            self._rebuilt[tp] = self._rebuilt.get(tp, 0) + 1
            self._behind_since[tp] = now

    def hopeless(self, stuck: Collection[TopicPartition]) -> list[TopicPartition]:
        """Those of the stuck that no new consumer got moving."""
        return [tp for tp in stuck if self._rebuilt.get(tp, 0) >= self._rebuilds]


# Asks the broker, now and then and beside the reading, what a reader should have seen. Reads nothing itself.

log = structlog.get_logger()


DEAF_AFTER = 2
"""So many times in a row the broker answered and the consumer did not: aiokafka's update of metadata can die unseen,
and then whoever waits for it waits for ever, while records go on coming."""


class _Answer(NamedTuple):
    """``ends`` None: the broker is there, but this consumer cannot ask it for offsets."""

    counts: dict[str, int]
    ends: Positions | None


class Lookout:
    """For one subscription. ``whole``: it means to read every partition of its topics."""

    def __init__(self, reader: Reader, partitions: Iterable[TopicPartition], *, whole: bool) -> None:
        self._reader = reader
        self._partitions = tuple(partitions)
        self._whole = whole
        self._timeout_s = reader.settings.stall_timeout_ms / 1000
        self._watch = StallWatch(self._timeout_s, reader.settings.stall_rebuilds)
        self._missing: frozenset[str] = frozenset()
        self._asking: asyncio.Task[_Answer | None] | None = None
        self._deaf = 0
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Whether ``stuck`` has something to do; cheap, for every poll."""
        return asyncio.get_running_loop().time() >= self._due_at

    def stuck(
        self, consumer: AIOKafkaConsumer, positions: Positions, paused: Collection[TopicPartition]
    ) -> list[TopicPartition]:
        """The partitions for which this consumer is to be replaced; never waits.

        Raises:
            BusError: no new consumer got them moving, a topic is gone, or it has partitions that nobody reads.
        """
        now = asyncio.get_running_loop().time()
        self._due_at = now + self._timeout_s / 8
        self._watch.note(now, positions, paused)
        if self._asking is not None and self._asking.done():
            asking, self._asking = self._asking, None
            if (answer := asking.result()) is not None:
                self._judge_topics(answer.counts)
                self._deaf = self._deaf + 1 if answer.ends is None else 0
                if answer.ends is not None:
                    return self._judge_positions(self._watch.told(now, answer.ends), positions)
                if self._deaf >= DEAF_AFTER:
                    return self._judge_positions(list(self._partitions), positions)
        if self._asking is None and self._watch.should_ask(now):
            self._asking = asyncio.create_task(self._ask(consumer))
        return []

    def replaced(self, stuck: Collection[TopicPartition]) -> None:
        """A new consumer took over."""
        self._deaf = 0
        self._watch.rebuilt(asyncio.get_running_loop().time(), stuck)

    async def close(self) -> None:
        """End what is being asked."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, consumer: AIOKafkaConsumer) -> _Answer | None:
        try:
            counts = await partitions_seen_by(consumer._client, self._reader.settings)  # noqa: SLF001
        except BusError as error:
            self._reader.outage.begin(self._reader.client_id, error)
            return None
        self._reader.outage.end(self._reader.client_id)
        there = [tp for tp in self._partitions if tp.partition < counts.get(tp.topic, 0)]
        try:
            ends = dict.fromkeys(self._partitions, 0) | await self._reader.offsets(consumer.end_offsets, there)
        except BusError as error:
            log.warning("a reader gets no offsets", client_id=self._reader.client_id, error=str(error))
            return _Answer(counts, None)
        return _Answer(counts, ends)

    def _judge_topics(self, counts: dict[str, int]) -> None:
        known: dict[str, int] = {}
        for tp in self._partitions:
            known[tp.topic] = max(known.get(tp.topic, 0), tp.partition + 1)
        missing = frozenset(topic for topic, count in known.items() if counts.get(topic, 0) < count)
        if gone := sorted(missing & self._missing):  # seen twice: a broker that just started may not know it yet
            raise BusError(f"expected the topics {gone} to exist, the broker says they were deleted; start anew")
        self._missing = missing
        for topic, count in known.items():
            if self._whole and counts.get(topic, 0) > count:
                raise BusError(
                    f"expected {count} partitions of {topic}, there are {counts[topic]} now; start anew to read all"
                )

    def _judge_positions(self, stuck: list[TopicPartition], positions: Positions) -> list[TopicPartition]:
        if hopeless := self._watch.hopeless(stuck):
            where = ", ".join(f"{tp.topic}/{tp.partition} at offset {positions[tp]}" for tp in hopeless)
            raise BusError(
                f"expected a new consumer to read on, {self._reader.client_id} is still stuck in {where} after "
                f"{self._reader.settings.stall_rebuilds} attempts; start anew, and look at the broker's log"
            )
        return stuck


TURNS_TO_ASK = 6
"""Turns of the event loop that aiokafka's fetcher needs from seeing an empty buffer to writing its next request."""


class KafkaSubscription:
    """``bus.port.Subscription``. Opened by ``open_subscription``; ``whole``: all partitions of its topics."""

    def __init__(self, reader: Reader, consumer: AIOKafkaConsumer, positions: Positions, *, whole: bool) -> None:
        self._reader = reader
        self._assigned = frozenset(positions)
        self._paused: set[TopicPartition] = set()
        self._lookout = Lookout(reader, self._assigned, whole=whole)
        self._closed = False
        self._read_with(consumer, positions)

    def _read_with(self, consumer: AIOKafkaConsumer, positions: Positions) -> None:
        self._next = dict(positions)
        self._seek_to_next(consumer)
        consumer.resume(*(KafkaPartition(*tp) for tp in self._assigned - self._paused))
        self._consumer = consumer

    def _seek_to_next(self, consumer: AIOKafkaConsumer) -> None:
        for tp, offset in self._next.items():
            consumer.seek(KafkaPartition(*tp), offset)

    def _open_consumer(self) -> AIOKafkaConsumer:
        if self._closed:
            raise BusError(f"subscription {self._reader.client_id} is closed; open a new one")
        return self._consumer

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records, or none after the time-out. Paused partitions deliver nothing.

        Raises:
            DataLossRefused: the broker does not hold the next offset (any more); it lists what is missing.
            BusError: the subscription is closed, the broker refuses, or this reader is stuck for good.
        """
        self._open_consumer()
        if self._lookout.is_due():
            await self._look_after(self._consumer)
        consumer = self._consumer
        await asyncio.sleep(0)  # a caller that asks again and again without waiting would keep the loop from reading
        with our_errors(f"reading as {self._reader.client_id}"):
            try:
                fetched = await consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
            except CorruptRecordException as error:
                log.warning("damaged bytes are fetched again", client_id=self._reader.client_id, error=str(error))
                self._seek_to_next(consumer)
                fetched = {}
            except OffsetOutOfRangeError:
                self._seek_to_next(consumer)
                refuse_holes(self._next, *await self._reader.extents(consumer, self._assigned))
                raise
            except Exception:
                self._seek_to_next(consumer)  # aiokafka drops what it had taken from the other partitions
                raise
        if fetched and self._reader.ahead:
            await self._let_it_fetch(consumer)
        records = []
        for tp, batch in fetched.items():
            records += _records(tp, batch)
            self._next[TopicPartition(*tp)] = records[-1].offset + 1
        return records

    async def _let_it_fetch(self, consumer: AIOKafkaConsumer) -> None:
        """Let aiokafka ask the broker for more before the caller decodes these; it would only ask at the next poll."""
        try:
            for _ in range(TURNS_TO_ASK):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._seek_to_next(consumer)  # what was just taken is not delivered
            raise

    async def _look_after(self, consumer: AIOKafkaConsumer) -> None:
        positions = await self.positions()
        stuck = self._lookout.stuck(consumer, positions, self._paused)
        if not stuck:
            return
        log.warning("replacing a consumer that stopped reading", client_id=self._reader.client_id, stuck=stuck)
        try:
            fresh = await self._reader.assigned(self._assigned)
        except BusUnavailable as error:
            self._reader.outage.begin(self._reader.client_id, error)
            return
        self._read_with(fresh, positions)
        self._lookout.replaced(stuck)
        await discard(consumer)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop delivering from these partitions."""
        wanted = self._assigned.intersection(partitions)
        self._paused |= wanted
        self._open_consumer().pause(*(KafkaPartition(*tp) for tp in wanted))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these partitions again."""
        wanted = self._assigned.intersection(partitions)
        self._paused -= wanted
        self._open_consumer().resume(*(KafkaPartition(*tp) for tp in wanted))

    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions this subscription reads."""
        return self._assigned

    async def positions(self) -> dict[TopicPartition, int]:
        """The next offset that ``poll`` will deliver, by partition."""
        consumer = self._open_consumer()
        return {tp: await consumer.position(KafkaPartition(*tp)) for tp in self._assigned}

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """The offset after the last record, by partition.

        Raises:
            BusUnavailable: no broker answers.
        """
        return await self._reader.offsets(self._open_consumer().end_offsets, self._assigned)

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """The oldest offset that the broker still holds, by partition.

        Raises:
            BusUnavailable: no broker answers.
        """
        return await self._reader.offsets(self._open_consumer().beginning_offsets, self._assigned)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Tell the broker how far we are, for lag displays only; the checkpoint is the truth.

        Raises:
            BusError: the broker refuses or does not answer.
        """
        assert self._reader.group_id is not None, "commit needs a subscription with a group_id"
        if not offsets:
            return
        settings = self._reader.settings
        with our_errors(f"committing offsets of {self._reader.group_id}"):
            async with asyncio.timeout(settings.request_timeout_ms / 1000):
                await self._open_consumer().commit({KafkaPartition(*tp): offset for tp, offset in offsets.items()})

    async def close(self) -> None:
        """Release; bounded in time; idempotent."""
        if not self._closed:
            self._closed = True
            await self._lookout.close()
            await discard(self._consumer)


def _records(tp: KafkaPartition, batch: Iterable[ConsumerRecord]) -> list[Record]:
    topic, partition = tp
    return [
        Record(
            topic,
            partition,
            raw.offset,
            None if raw.key is None else raw.key.decode(errors="replace"),
            raw.value,
            raw.headers,
            raw.timestamp / 1000,
        )
        for raw in batch
    ]


async def open_subscription(
    reader: Reader, assigned: Iterable[TopicPartition], start: Start, *, whole: bool
) -> KafkaSubscription:
    """A subscription whose positions are pinned when this returns.

    Raises:
        BusUnavailable: no broker answers.
        DataLossRefused: named start offsets are not on the broker (any more); it lists what is missing.
    """
    partitions = tuple(assigned)
    consumer = await reader.assigned(partitions)
    try:
        positions = starting_positions(start, *await reader.extents(consumer, partitions))
        return KafkaSubscription(reader, consumer, positions, whole=whole)
    except BaseException:
        await discard(consumer)
        raise
