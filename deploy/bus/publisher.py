"""Writes records to Kafka in batches of our own, which is several times cheaper than aiokafka's record by record.

Invariants: a producer of aiokafka that failed a batch is discarded, because its sequence numbers have a hole;
batches that expire before they were handed to it are dropped, those handed over may still arrive; a producer that gets
nothing acknowledged while the broker answers is replaced, a bounded number of times.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    KafkaError,
    LeaderNotAvailableError,
    NotLeaderForPartitionError,
)
from aiokafka.structs import RecordMetadata

from deploy.bus.client.batches import Batch, Lane, new_builder, partition_of
from deploy.bus.client.buffer_space import BufferSpace
from deploy.bus.client.stopping import stop
from deploy.bus.connection import our_errors, partition_counts, partitions_seen_by
from deploy.bus.settings import KafkaSettings
from schemas.errors import BusError, BusUnavailable, DeliveryUnknown
from schemas.ports.bus import Outgoing, Position, TopicPartition

CLOSE_FLUSH_S = 10.0
STOP_TIMEOUT_S = 2.0
YIELD_BYTES = 128 << 10
_RECORD_OVERHEAD = 100

log = structlog.get_logger()


class KafkaPublisher:
    """``schemas.ports.bus.Publisher``. Opened by ``KafkaBus``; close it on the loop it was opened on."""

    def __init__(
        self,
        producer: AIOKafkaProducer,
        connect: Callable[[], Awaitable[AIOKafkaProducer]],
        settings: KafkaSettings,
        client_id: str,
    ) -> None:
        self._producer: AIOKafkaProducer | None = producer
        self._connect = connect
        self._connecting = asyncio.Lock()
        self._settings = settings
        self._client_id = client_id
        self._space = BufferSpace(settings.max_in_flight_bytes)
        self._counts: dict[str, int] = {}
        self._lanes: dict[tuple[str, int | None], Lane] = {}
        self._retiring: dict[asyncio.Task[None], AIOKafkaProducer] = {}
        self._unbroken = 0
        self._stalls = 0
        self._acknowledged_at = 0.0
        self._closed = False

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """Hand a record over; waits only for buffer space.

        Raises:
            BusUnavailable: the topic does not exist, or the broker left no buffer space within the deadline.
            BusError: the publisher is closed, or there is no such partition.
        """
        self._refuse_when_closed()
        size = _RECORD_OVERHEAD + (0 if record.value is None else len(record.value))
        if not self._space.take(size):
            await self._wait_for_room(size)
        try:
            lane = self._lanes.get((record.topic, record.partition)) or await self._lane_for(record)
            self._refuse_when_closed()
            future = lane.append(record, size)
        except BaseException:
            self._space.release(size)
            raise
        self._unbroken += size
        if self._unbroken > YIELD_BYTES:
            self._unbroken = 0
            await asyncio.sleep(0)  # a caller that never waits would keep the loop from sending
        return future

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise BusError(f"publisher {self._client_id} is closed; open a new one")
        if self._stalls >= self._settings.stall_rebuilds:
            raise BusError(
                f"expected the broker to acknowledge what {self._client_id} writes, it answers and does not: "
                f"{self._stalls} producers in a row got nothing written; start anew, and look at the broker's log"
            )

    async def _wait_for_room(self, size: int) -> None:
        try:
            await self._space.wait(size, self._settings.delivery_timeout_ms / 1000)
        except TimeoutError as error:
            raise BusUnavailable(
                f"expected buffer space for {size} bytes, got none in {self._settings.delivery_timeout_ms} ms: "
                f"{self._settings.bootstrap_servers} does not take the {self._space.used} bytes already waiting"
            ) from error

    async def _lane_for(self, record: Outgoing) -> Lane:
        topic, number = record.topic, record.partition
        count = self._counts.get(topic, 0)
        if not count or (number is not None and number >= count):
            count = await self._count_partitions(topic)
        number = partition_of(record.key, count) if number is None else number
        if not 0 <= number < count:
            raise BusError(f"expected a partition below {count} of {topic}, got {number}")
        name = TopicPartition(topic, number)
        if name not in self._lanes:
            linger_s = self._settings.linger_ms / 1000
            self._lanes[name] = Lane(name, self._new_batch, self._send, self._drop, linger_s)
        return self._lanes[name]

    async def _count_partitions(self, topic: str) -> int:
        producer = await self._connected()
        counts = await partitions_seen_by(producer.client, self._settings)
        if topic not in counts:
            raise BusUnavailable(f"expected an existing topic, got {topic!r}; create it with `streamrl topics apply`")
        self._counts = counts
        with our_errors(f"finding the leaders of {topic}"):
            async with asyncio.timeout(self._settings.connect_timeout_ms / 1000):
                await producer.partitions_for(topic)
        return counts[topic]

    async def _connected(self) -> AIOKafkaProducer:
        async with self._connecting:
            if self._producer is None:
                self._producer = await self._connect()
            return self._producer

    def _new_batch(self, lane: TopicPartition) -> Batch:
        builder = new_builder(self._settings.max_batch_bytes, self._settings.compression_type)
        return Batch(builder, lane, self._settings.delivery_timeout_ms / 1000)

    async def _send(self, batch: Batch) -> None:
        producer: AIOKafkaProducer | None = None
        try:
            producer = await self._connected()
            sent = await producer.send_batch(batch.builder, batch.lane.topic, partition=batch.lane.partition)
            batch.stored(await self._acknowledged(producer, sent))
        except BusError as error:
            batch.fail(error)
        except KafkaError as error:
            batch.fail(_failure(error, batch))
            self._retire(producer)
        finally:
            self._space.release(batch.size)

    async def _acknowledged(self, producer: AIOKafkaProducer, sent: "asyncio.Future[RecordMetadata]") -> int:
        """The offset of a batch's first record.

        Raises:
            DeliveryUnknown: this producer gets nothing acknowledged, though the broker answers; it is discarded.
        """
        loop, patience_s = asyncio.get_running_loop(), self._settings.writer_stall_s
        waiting_since = loop.time()
        while not (await asyncio.wait([sent], timeout=patience_s))[0]:
            quiet_s = loop.time() - max(waiting_since, self._acknowledged_at)
            if quiet_s >= patience_s and producer is self._producer and await self._broker_answers():
                self._stalls += 1
                self._retire(producer)
                raise DeliveryUnknown(f"nothing acknowledged in {quiet_s:.0f} s; it may have arrived, send it again")
        offset: int = (await sent).offset
        self._acknowledged_at, self._stalls = loop.time(), 0
        return offset

    async def _broker_answers(self) -> bool:
        try:
            await partition_counts(self._settings, self._client_id)
        except BusError:
            return False
        return True

    def _drop(self, batch: Batch) -> None:
        self._space.release(batch.size)

    def _retire(self, producer: AIOKafkaProducer | None) -> None:
        if producer is not None and producer is self._producer and not self._closed:
            self._producer = None
            log.warning("publisher reconnects after a failed batch", client_id=self._client_id)
            task = asyncio.create_task(stop(producer, self._settings.delivery_timeout_ms / 1000))
            self._retiring[task] = producer
            task.add_done_callback(self._retiring.pop)

    async def publish(self, record: Outgoing) -> Position:
        """``submit`` and wait until the broker has it.

        Raises:
            DeliveryUnknown: the deadline passed; the record may still arrive.
            BusError: the broker refused it.
        """
        return await (await self.submit(record))

    async def flush(self) -> None:
        """Wait until everything submitted so far is settled: stored, refused, or past its deadline."""
        if waited_for := self._unsettled():
            await asyncio.wait(waited_for)

    def _unsettled(self) -> "list[asyncio.Future[None]]":
        return [future for lane in self._lanes.values() for future in lane.unsettled()]

    async def close(self) -> None:
        """Flush for at most ten seconds, then release; what is still on its way ends in ``DeliveryUnknown``."""
        if self._closed:
            return
        self._closed = True
        if waited_for := self._unsettled():
            await asyncio.wait(waited_for, timeout=CLOSE_FLUSH_S)
        producers = [*self._retiring.values(), *([self._producer] if self._producer else [])]
        await asyncio.gather(*(stop(producer, STOP_TIMEOUT_S) for producer in producers))
        error = DeliveryUnknown(f"publisher {self._client_id} was closed before the broker answered")
        await asyncio.gather(*self._retiring, *(lane.stop(error) for lane in self._lanes.values()))


def _failure(error: KafkaError, batch: Batch) -> BusError:
    wanted = f"expected {batch.lane.topic}/{batch.lane.partition} to take a batch of {batch.size} bytes"
    if isinstance(error, LeaderNotAvailableError | NotLeaderForPartitionError):
        return BusUnavailable(f"{wanted}, got no leader for the partition: wait for the brokers, then send it again")
    if isinstance(error, BrokerResponseError):
        return BusError(f"{wanted}, the broker refused: {error}")
    return DeliveryUnknown(f"{wanted}, got {error}; it may have arrived, send it again under the same ids")
