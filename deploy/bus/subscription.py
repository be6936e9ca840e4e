"""Reads assigned partitions of a Kafka broker. Decodes nothing: whatever is in a record, the next one can be read.

Invariants: positions are set by us before the first read, never by a committed offset; a read that is cancelled
loses no record; a consumer that stops reading while there is something to read is replaced by a new one, and if
that does not help, reading ends with an error.
"""

import asyncio
from collections.abc import Iterable, Mapping

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import CorruptRecordException, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from deploy.bus.client.stopping import discard
from deploy.bus.connection import our_errors
from deploy.bus.consumers import Positions, Reader, refuse_holes, starting_positions
from deploy.bus.lookout import Lookout
from schemas.errors import BusError, BusUnavailable
from schemas.ports.bus import Record, Start, TopicPartition

TURNS_TO_ASK = 6
"""Turns of the event loop that aiokafka's fetcher needs from seeing an empty buffer to writing its next request."""

log = structlog.get_logger()


class KafkaSubscription:
    """``schemas.ports.bus.Subscription``. Opened by ``open_subscription``; ``whole``: all partitions of its topics."""

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
