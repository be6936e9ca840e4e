"""Reads assigned partitions of a Kafka broker. Decodes nothing: whatever is in a record, the next one can be read.

Invariants: positions are set by us before the first read, never by a committed offset; a read that is cancelled
loses no record; a consumer that stops reading while there is something to read is replaced by a new one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.structs import ConsumerRecord

from deploy.bus.connection import client_options, discard, our_errors, started
from deploy.bus.settings import KafkaSettings
from schemas.errors import BusError, DataLossRefused
from schemas.ports.bus import Record, Start, TopicPartition

STALL_S = 20.0
TURNS_TO_ASK = 6
"""Turns of the event loop that aiokafka's fetcher needs from seeing an empty buffer to writing its next request."""
AskOffsets = Callable[[list[KafkaPartition]], Awaitable[dict[KafkaPartition, int]]]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reader:
    """How consumers of one subscription are made."""

    settings: KafkaSettings
    client_id: str
    group_id: str | None

    async def assigned(self, partitions: Iterable[TopicPartition]) -> AIOKafkaConsumer:
        """A started consumer of these partitions, all paused at offset 0 so that it reads nothing yet."""
        settings = self.settings
        consumer = AIOKafkaConsumer(
            **client_options(settings, self.client_id),
            group_id=self.group_id,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=settings.fetch_max_wait_ms,
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


class KafkaSubscription:
    """``schemas.ports.bus.Subscription``. Opened by ``open_subscription``."""

    def __init__(self, reader: Reader, consumer: AIOKafkaConsumer, positions: Mapping[TopicPartition, int]) -> None:
        self._reader = reader
        self._assigned = frozenset(positions)
        self._paused: set[TopicPartition] = set()
        self._closed = False
        self._read_with(consumer, positions)

    def _read_with(self, consumer: AIOKafkaConsumer, positions: Mapping[TopicPartition, int]) -> None:
        self._next = dict(positions)
        self._seek_to_next(consumer)
        consumer.resume(*(KafkaPartition(*tp) for tp in self._assigned - self._paused))
        self._consumer = consumer
        self._heard_at = asyncio.get_running_loop().time()

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
            DataLossRefused: the broker no longer keeps the next offset.
            BusError: the subscription is closed, or the broker refuses.
        """
        consumer = self._open_consumer()
        await asyncio.sleep(0)  # a caller that asks again and again without waiting would keep the loop from reading
        with our_errors(f"reading as {self._reader.client_id}"):
            try:
                fetched = await consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
            except UnicodeDecodeError:
                fetched = await self._step_over(consumer)
            except Exception:
                self._seek_to_next(consumer)  # aiokafka drops what it had taken from the other partitions
                raise
        if fetched:
            await self._let_it_fetch(consumer)
        records = []
        for tp, batch in fetched.items():
            records += _records(tp, batch)
            self._next[TopicPartition(*tp)] = records[-1].offset + 1
        await self._look_after(consumer, bool(records))
        return records

    async def _let_it_fetch(self, consumer: AIOKafkaConsumer) -> None:
        """Let aiokafka ask the broker for more before the caller decodes these; it would only ask at the next poll."""
        try:
            for _ in range(TURNS_TO_ASK):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._seek_to_next(consumer)  # what was just taken is not delivered
            raise

    async def _look_after(self, consumer: AIOKafkaConsumer, heard: bool) -> None:
        now = asyncio.get_running_loop().time()
        if heard:
            self._heard_at = now
        elif now - self._heard_at > STALL_S:
            self._heard_at = now
            await self._replace_if_stuck(consumer)

    async def _step_over(self, consumer: AIOKafkaConsumer) -> dict[KafkaPartition, list[ConsumerRecord]]:
        """Read singly until the record with a header name that is not text; it comes as one without content."""
        self._seek_to_next(consumer)
        wait_ms = 2 * self._reader.settings.fetch_max_wait_ms
        for tp in self._assigned - self._paused:
            kafka = KafkaPartition(*tp)
            try:
                fetched = await consumer.getmany(kafka, timeout_ms=wait_ms, max_records=1)
            except UnicodeDecodeError:
                consumer.seek(kafka, self._next[tp] + 1)
                return {kafka: [_unreadable(kafka, self._next[tp])]}
            if fetched:
                return dict(fetched)
        return {}

    async def _replace_if_stuck(self, consumer: AIOKafkaConsumer) -> None:
        try:
            positions, ends = await self.positions(), await self.end_offsets()
        except BusError as error:
            log.warning("the broker does not answer a reader", client_id=self._reader.client_id, error=str(error))
            return
        behind = [tp for tp in self._assigned - self._paused if positions[tp] < ends[tp]]
        if behind and consumer is self._consumer:
            log.warning("replacing a consumer that stopped reading", client_id=self._reader.client_id, behind=behind)
            fresh = await self._reader.assigned(self._assigned)
            self._read_with(fresh, positions)
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
            await discard(self._consumer)


def _unreadable(tp: KafkaPartition, offset: int) -> ConsumerRecord:
    now_ms = int(time.time() * 1000)
    return ConsumerRecord(tp.topic, tp.partition, offset, now_ms, 0, None, None, None, -1, -1, ())


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
    settings: KafkaSettings, client_id: str, assigned: Iterable[TopicPartition], start: Start, group_id: str | None
) -> KafkaSubscription:
    """A subscription whose positions are pinned when this returns.

    Raises:
        BusUnavailable: no broker answers.
        DataLossRefused: a named start offset is not on the broker (any more).
    """
    reader = Reader(settings, client_id, group_id)
    partitions = tuple(assigned)
    consumer = await reader.assigned(partitions)
    try:
        first = await reader.offsets(consumer.beginning_offsets, partitions)
        end = await reader.offsets(consumer.end_offsets, partitions)
        return KafkaSubscription(reader, consumer, {tp: _start_of(tp, start, first[tp], end[tp]) for tp in partitions})
    except BaseException:
        await discard(consumer)
        raise


def _start_of(tp: TopicPartition, start: Start, first: int, end: int) -> int:
    if start == "earliest":
        return first
    if start == "latest":
        return end
    offset = start.get(tp, first)
    if not first <= offset <= end:
        raise DataLossRefused(
            f"expected to go on at offset {offset} of {tp.topic}/{tp.partition}, the broker holds {first} to {end}: "
            "records were deleted before they were read (retention), or this is not the broker they were written to"
        )
    return offset
