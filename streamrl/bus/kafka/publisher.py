"""Writes records to Kafka in batches built here, which is several times cheaper than aiokafka's record by record.

Invariants:
- records of a partition are sent in the order in which they were submitted, one batch at a time;
- the future of every record is settled once, at the latest when the delivery deadline passes;
- bytes count as held until their batch is settled or dropped unsent, and the settings limit the bytes held;
- a producer of aiokafka that failed a batch is discarded, because its sequence numbers have a gap;
- a_broken_producer_is_replaced: when one of its tasks ends, the outcome of its batches is unknown, and the next batch
  gets a new producer;
- batches that expire before they were passed to a producer are dropped; batches that were passed may still arrive;
- a producer that gets nothing acknowledged while the broker answers is replaced, a bounded number of times.

A record passes ``KafkaPublisher`` (space, choice of partition), its ``PartitionQueue`` (order) and a ``RecordBatch``.
"""

import asyncio
import functools
import random
from collections import deque
from collections.abc import Awaitable, Callable

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    KafkaError,
    LeaderNotAvailableError,
    NotLeaderForPartitionError,
)
from aiokafka.partitioner import murmur2
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import RecordMetadata

from streamrl.bus.kafka.aiokafka_internals import watch_tasks
from streamrl.bus.kafka.connection import converting_errors, partition_counts, partitions_seen_by, stop
from streamrl.bus.kafka.limits import LIMITS, ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, Position, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown

CLOSE_FLUSH_S = 10.0
STOP_TIMEOUT_S = 2.0
REQUESTS_PER_DELIVERY = 2
"""Request time-outs after which a send's outcome is unknown: time for a second attempt. It may still arrive."""
# Seconds after which an open batch takes no more records. The batch's deadline runs from its first record, so a later
# record gets less than its whole delivery deadline. A second is short compared to the shortest deadline in use, and far
# longer than a batch lingers.
MAX_AGE_S = 1.0
# Bytes submitted without a pause; then the event loop gets a turn to send some of them.
YIELD_BYTES = 128 << 10
# Bytes that a record without a value takes while it is held: its key, headers, future, and place in the batch.
_RECORD_OVERHEAD = 100
_CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}  # Kafka's numbers

log = structlog.get_logger()


class KafkaPublisher:
    """``bus.port.Publisher``. ``KafkaBus`` opens it; close it on the event loop on which it was opened."""

    def __init__(
        self,
        producer: AIOKafkaProducer,
        connect: Callable[[], Awaitable[AIOKafkaProducer]],
        settings: KafkaSettings,
        client_id: str,
        limits: ClientLimits = LIMITS,
    ) -> None:
        self._producer: AIOKafkaProducer | None = producer
        watch_tasks(producer, functools.partial(self._on_broken, producer))
        self._connect = connect
        self._connecting = asyncio.Lock()
        self._settings = settings
        self._limits = limits
        # An acknowledgement may take one request time-out longer than progress.
        self._stall_timeout_s = limits.stall_timeout_s + settings.request_timeout_ms / 1000
        self._delivery_timeout_s = REQUESTS_PER_DELIVERY * settings.request_timeout_ms / 1000
        self._client_id = client_id
        self._space = BufferSpace(limits.max_in_flight_bytes)
        self._counts: dict[str, int] = {}
        # By topic and partition. A record whose key selects the partition has None there and is never found;
        # ``_queue_for`` then finds its queue.
        self._queues: dict[tuple[str, int | None], PartitionQueue] = {}
        self._retiring: dict[asyncio.Task[None], AIOKafkaProducer] = {}
        self._bytes_since_pause = 0
        self._stalls = 0  # consecutive producers that got nothing acknowledged
        self._acknowledged_at = 0.0
        self._is_broken = False  # a task of the producer has ended
        self._closed = False

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """Put a record into the buffer, waiting only for space; see the port.

        Raises:
            BusUnavailable: the topic does not exist, or no buffer space became free within the deadline.
            BusError: the publisher is closed, or the partition does not exist.
        """
        self._refuse_if_unusable()
        size = _RECORD_OVERHEAD + (0 if record.value is None else len(record.value))
        if not self._space.take(size):
            await self._wait_for_room(size)
        try:
            queue = self._queues.get((record.topic, record.partition)) or await self._queue_for(record)
            # Checked again, because it may have been closed during the waits. There is no wait from here to ``append``.
            self._refuse_if_unusable()
            future = queue.append(record, size)
        except BaseException:
            self._space.release(size)
            raise
        self._bytes_since_pause += size
        if self._bytes_since_pause > YIELD_BYTES:
            self._bytes_since_pause = 0
            await asyncio.sleep(0)  # otherwise a caller that never waits would keep the event loop from sending
        return future

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise BusError(f"publisher {self._client_id} is closed; open a new one")
        if self._stalls >= self._limits.max_client_restarts:
            raise BusError(
                f"expected the broker to acknowledge records of {self._client_id}, it answers but acknowledges none: "
                f"{self._stalls} producers in a row failed; restart this process and look at the broker's log"
            )

    async def _wait_for_room(self, size: int) -> None:
        try:
            await self._space.wait(size, self._delivery_timeout_s)
        except TimeoutError as error:
            raise BusUnavailable(
                f"expected buffer space for {size} bytes, got none in {self._delivery_timeout_s:g} s: "
                f"{self._settings.bootstrap_servers} has not acknowledged the {self._space.used} bytes already waiting"
            ) from error

    async def _queue_for(self, record: Outgoing) -> "PartitionQueue":
        topic, number = record.topic, record.partition
        count = self._counts.get(topic, 0)
        # An unknown partition may have been added since. The broker is asked again before it is refused.
        if not count or (number is not None and number >= count):
            count = await self._count_partitions(topic)
        number = partition_of(record.key, count) if number is None else number
        if not 0 <= number < count:
            raise BusError(f"expected a partition below {count} of {topic}, got {number}")
        name = TopicPartition(topic, number)
        if name not in self._queues:
            linger_s = self._limits.linger_s
            self._queues[name] = PartitionQueue(name, self._new_batch, self._send, self._drop, linger_s)
        return self._queues[name]

    async def _count_partitions(self, topic: str) -> int:
        producer = await self._connected()
        counts = await partitions_seen_by(producer.client, self._settings, [topic], self._limits)
        if topic not in counts:
            raise BusUnavailable(
                f"expected an existing topic, got {topic!r}; create it with `streamrl topics apply --run RUN`"
            )
        self._counts |= counts
        with converting_errors(f"finding the leaders of {topic}"):
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await producer.partitions_for(topic)
        return counts[topic]

    async def _connected(self) -> AIOKafkaProducer:
        # After a failure, all queues come here at once. One of them connects, and the others use its producer.
        async with self._connecting:
            if self._is_broken:
                self._retire(self._producer)
            if self._producer is None:
                self._producer = producer = await self._connect()
                watch_tasks(producer, functools.partial(self._on_broken, producer))
            return self._producer

    def _new_batch(self, partition: TopicPartition) -> "RecordBatch":
        builder = new_builder(self._limits.max_batch_bytes, self._settings.compression_type)
        return RecordBatch(builder, partition, self._delivery_timeout_s)

    async def _send(self, batch: "RecordBatch") -> None:
        producer: AIOKafkaProducer | None = None
        try:
            producer = await self._connected()
            # aiokafka's own wait for metadata has no bound.
            async with asyncio.timeout(self._stall_timeout_s):
                sent = await producer.send_batch(
                    batch.builder, batch.partition.topic, partition=batch.partition.partition
                )
            batch.stored(await self._acknowledged(producer, sent))
        except BusError as error:
            # No producer could be opened, or it stalled and is already retired: there is none to retire here.
            batch.fail(error)
        except (KafkaError, TimeoutError) as error:
            batch.fail(_failure(error, batch))
            self._retire(producer)
        except Exception as error:
            # A bug in the library. It must not end the queue, whose other batches would wait for their deadline.
            log.exception("a batch failed in the Kafka client", client_id=self._client_id)
            batch.fail(_failure(error, batch))
            self._retire(producer)
        finally:
            self._space.release(batch.size)

    async def _acknowledged(self, producer: AIOKafkaProducer, sent: "asyncio.Future[RecordMetadata]") -> int:
        """The offset of a batch's first record.

        Raises:
            DeliveryUnknown: this producer gets nothing acknowledged, though the broker answers; it is discarded.
        """
        loop, patience_s = asyncio.get_running_loop(), self._stall_timeout_s
        waiting_since = loop.time()
        # ``wait`` and not ``wait_for``, which would cancel the future of a batch that may still be acknowledged.
        while not (await asyncio.wait([sent], timeout=patience_s))[0]:
            # If another batch was acknowledged in the meantime, this producer is slow, not stuck.
            quiet_s = loop.time() - max(waiting_since, self._acknowledged_at)
            if quiet_s >= patience_s and producer is self._producer and await self._broker_answers():
                self._stalls += 1
                self._retire(producer)
                raise DeliveryUnknown(
                    f"nothing acknowledged in {quiet_s:.0f} s; the records may have arrived, send them again"
                )
        offset: int = (await sent).offset
        self._acknowledged_at, self._stalls = loop.time(), 0
        return offset

    async def _broker_answers(self) -> bool:
        try:
            # Over a separate connection, because this producer's may be broken.
            await partition_counts(self._settings, self._client_id, (), self._limits)
        except BusError:
            return False
        return True

    def _on_broken(self, producer: AIOKafkaProducer, error: BaseException | None) -> None:
        # Also called when a producer is stopped; by then it is no longer ``self._producer``. The next batch replaces a
        # broken producer and not this method, since the event loop may be ending all of its tasks.
        if producer is not self._producer or self._closed or self._is_broken:
            return
        self._is_broken = True
        self._stalls += 1
        if error is not None:
            log.error(
                "a producer broke; the outcome of its records is unknown", client_id=self._client_id, error=str(error)
            )

    def _drop(self, batch: "RecordBatch") -> None:
        self._space.release(batch.size)

    def _retire(self, producer: AIOKafkaProducer | None) -> None:
        # Several batches fail with one producer. The first one retires it, and the others must not retire its
        # successor.
        if producer is not None and producer is self._producer and not self._closed:
            self._producer, self._is_broken = None, False
            log.warning("publisher reconnects with a new producer", client_id=self._client_id)
            # In the background and with patience: its batches for other partitions may still be acknowledged.
            task = asyncio.create_task(stop(producer, self._delivery_timeout_s))
            self._retiring[task] = producer
            task.add_done_callback(self._retiring.pop)

    async def publish(self, record: Outgoing) -> Position:
        """``submit`` a record and wait until the broker has it.

        Raises:
            DeliveryUnknown: the deadline passed; the record may still arrive.
            BusError: the broker refused the record.
        """
        return await (await self.submit(record))

    async def flush(self) -> None:
        """Wait until all records submitted so far are settled: stored, refused, or past their deadline."""
        if unsettled := self._unsettled():
            await asyncio.wait(unsettled)

    def _unsettled(self) -> "list[asyncio.Future[None]]":
        return [future for queue in self._queues.values() for future in queue.unsettled()]

    async def close(self) -> None:
        """Flush for at most ten seconds, then release resources. Unsettled records end in ``DeliveryUnknown``."""
        if self._closed:
            return
        self._closed = True
        if unsettled := self._unsettled():
            await asyncio.wait(unsettled, timeout=CLOSE_FLUSH_S)
        producers = [*self._retiring.values(), *([self._producer] if self._producer else [])]
        await asyncio.gather(*(stop(producer, STOP_TIMEOUT_S) for producer in producers))
        error = DeliveryUnknown(f"publisher {self._client_id} was closed before the broker answered")
        await asyncio.gather(*self._retiring, *(queue.stop(error) for queue in self._queues.values()))


def _failure(error: Exception, batch: "RecordBatch") -> BusError:
    wanted = f"expected {_name_of(batch.partition)} to take a batch of {batch.size} bytes"
    # aiokafka raises these if it found no leader in time, also for a batch that it had sent before. They are
    # ``BrokerResponseError`` too, so they have to be checked first.
    is_leaderless = isinstance(error, LeaderNotAvailableError | NotLeaderForPartitionError)
    if isinstance(error, BrokerResponseError) and not is_leaderless:
        return BusError(f"{wanted}, the broker refused: {error}")
    got = "no leader for it in time" if is_leaderless else str(error) if isinstance(error, KafkaError) else repr(error)
    return DeliveryUnknown(f"{wanted}, got {got}; the records may have arrived, send them again under the same ids")


def _name_of(partition: TopicPartition) -> str:
    return f"{partition.topic}/{partition.partition}"


class PartitionQueue:
    """The batches of one partition. They are sent one after the other, and the newest takes records."""

    def __init__(
        self,
        partition: TopicPartition,
        new_batch: Callable[[TopicPartition], "RecordBatch"],
        send: Callable[["RecordBatch"], Awaitable[None]],
        drop: Callable[["RecordBatch"], None],
        linger_s: float,
    ) -> None:
        self._partition = partition
        self._new_batch = new_batch
        self._send = send
        self._drop = drop
        self._linger_s = linger_s
        self._queue: deque[RecordBatch] = deque()
        self._sending: RecordBatch | None = None
        self._task: asyncio.Task[None] | None = None

    def append(self, record: Outgoing, size: int) -> "asyncio.Future[Position]":
        """Queue a record after the others and return its future."""
        # Only the newest batch takes records. The batch being sent never does, as it has left the queue.
        future = self._queue[-1].append(record, size) if self._queue else None
        if future is not None:
            return future
        batch = self._new_batch(self._partition)
        future = batch.append(record, size)
        assert future is not None, "an empty batch takes a record of any size"
        self._queue.append(batch)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return future

    def unsettled(self) -> "list[asyncio.Future[None]]":
        """Futures to wait for, one for each batch that is not settled."""
        return [batch.settled for batch in self._held() if not batch.settled.done()]

    def _held(self) -> list["RecordBatch"]:
        return [*self._queue, *([self._sending] if self._sending else [])]

    async def _run(self) -> None:
        try:
            # Only before the first batch: while a batch is in flight, the next one fills without lingering.
            await asyncio.sleep(self._linger_s)
            while self._queue:
                batch = self._queue.popleft()
                if batch.settled.done():  # expired while it waited for the ones before it
                    self._drop(batch)
                    continue
                # Not reset after a cancellation: ``stop`` then finds the batch here and fails it.
                self._sending = batch
                await self._send(batch)
                self._sending = None
        finally:
            self._task = None

    async def stop(self, error: BusError) -> None:
        """Stop sending. Batches that are not settled fail with ``error``."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for batch in self._held():
            batch.fail(error)
        self._queue.clear()


class RecordBatch:
    """Records that are sent together, and a future for each. ``deadline_s`` runs from the first record on."""

    def __init__(self, builder: BatchBuilder, partition: TopicPartition, deadline_s: float) -> None:
        self.builder = builder
        self.partition = partition
        self.size = 0
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._futures: list[asyncio.Future[Position]] = []
        self._deadline_s = deadline_s
        self._closes_at = loop.time() + MAX_AGE_S
        self._timer = loop.call_later(deadline_s, self._expire)

    def append(self, record: Outgoing, size: int) -> "asyncio.Future[Position] | None":
        """The record's future; None if the batch is full, or too old to give the record its whole deadline."""
        loop = asyncio.get_running_loop()
        # An empty batch takes its first record at any age: this process may have been stopped since it was made.
        if self._futures and (loop.time() > self._closes_at or self.settled.done()):
            return None
        if not append(self.builder, record):
            return None
        future: asyncio.Future[Position] = loop.create_future()
        self._futures.append(future)
        self.size += size
        return future

    def stored(self, offset: int) -> None:
        """Resolve the futures: the broker has the records, the first one at ``offset``."""
        topic, number = self.partition
        for index, future in enumerate(self._futures):
            # A future may already be done: past its deadline, which an answer cannot undo, or cancelled by its caller.
            if not future.done():
                future.set_result(Position(topic, number, offset + index))
        self._end()

    def fail(self, error: BusError) -> None:
        """Fail the future of every record that is not settled."""
        for future in self._futures:
            if not future.done():
                # A new exception for each: a shared one would collect the tracebacks of all tasks that raise it.
                future.set_exception(type(error)(*error.args))
        self._end()

    def _expire(self) -> None:
        self.fail(
            DeliveryUnknown(
                f"expected {_name_of(self.partition)} to take {len(self._futures)} records within "
                f"{self._deadline_s:g} s, got no answer; they may still arrive, send them again under the same ids"
            )
        )

    def _end(self) -> None:
        self._timer.cancel()
        if not self.settled.done():
            self.settled.set_result(None)


class BufferSpace:
    """A bounded number of bytes, granted in the order of the requests, so that records keep their order.

    A single record larger than the limit gets space when nothing else is held.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Number of bytes held now."""
        return self._used

    def take(self, size: int) -> bool:
        """Take space at once if there is enough and no other record waits; returns whether it was taken."""
        # A small record must not pass waiting large ones, or they would starve.
        if self._waiting or not self._fits(size):
            return False
        self._used += size
        return True

    async def wait(self, size: int, timeout_s: float) -> None:
        """Wait for space and take it.

        Raises:
            TimeoutError: not enough became free in time.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, granted)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException:
            # The space may have been granted in the same turn in which the wait ended. Then it must be given back here.
            if granted.done() and not granted.cancelled():
                self.release(size)
            else:
                # Later requests may fit where this one did not.
                self._waiting.remove(entry)
                self._grant()
            raise

    def release(self, size: int) -> None:
        """Give space back."""
        self._used -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, granted = self._waiting.popleft()
            self._used += size
            granted.set_result(None)


def new_builder(max_bytes: int, compression_type: str, *, transactional: bool = False) -> BatchBuilder:
    """An empty batch of aiokafka. A first record larger than ``max_bytes`` is sent alone.

    ``transactional`` marks the batch as part of a transaction. In a transaction, the broker also accepts a batch
    without the mark, but readers then see it at once, even if the transaction is aborted.
    """
    return BatchBuilder(max_bytes, _CODECS[compression_type], is_transactional=transactional)


def append(builder: BatchBuilder, record: Outgoing) -> bool:
    """Put a record into a batch; False if the batch is full."""
    key = None if record.key is None else record.key.encode()
    return builder.append(timestamp=None, key=key, value=record.value, headers=list(record.headers)) is not None


def partition_of(key: str | None, count: int) -> int:
    """The partition that Kafka's default partitioner selects; a random one for a record without a key."""
    return random.randrange(count) if key is None else _hashed(key, count)


# Cached, because aiokafka's murmur2 is a Python loop over the bytes, and keys repeat: all chunks of a trajectory share
# one.
@functools.lru_cache(maxsize=4096)
def _hashed(key: str, count: int) -> int:
    # The sign bit is cleared as in Java's client, so that both choose the same partition.
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % count
