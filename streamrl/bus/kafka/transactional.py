"""Kafka transactions: one short transaction per commit. Knows neither messages nor the catalogue of topics.

Invariants:
- a producer is discarded if the end of its transaction is uncertain, because a late request of it could end a later
  transaction;
- a_broken_transactional_producer_is_replaced: when one of its tasks ends, the next commit reopens the id;
- only the broker says whether there is a newer holder of the id; a time-out is never taken as a sign of one;
- every wait is bounded.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import BrokerResponseError, KafkaError, ProducerFenced
from aiokafka.producer.message_accumulator import BatchBuilder

from streamrl.bus.kafka.aiokafka_internals import (
    NO_IDENTITY,
    ProducerIdentity,
    identity_of,
    open_with_identity,
    watch_tasks,
)
from streamrl.bus.kafka.connection import partitions_seen_by, started, stop
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.publisher import append, new_builder, partition_of
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown, Superseded, causes_of

STOP_PATIENCE_S = 1.0  # a closed publisher has no records in flight: only connections have to close

log = structlog.get_logger()


class KafkaTransactionalPublisher:
    """``bus.port.TransactionalPublisher``. Opened by ``open_transactional``."""

    def __init__(
        self,
        make: Callable[[], AIOKafkaProducer],
        settings: KafkaSettings,
        transactional_id: str,
        limits: ClientLimits,
    ) -> None:
        self._make = make
        self._settings = settings
        self._limits = limits
        self._id = transactional_id
        self._identity: ProducerIdentity = NO_IDENTITY
        self._producer: AIOKafkaProducer | None = None
        self._counts: dict[str, int] = {}
        # A producer can have one open transaction. ``close`` takes the lock too, and so waits for the last one.
        self._lock = asyncio.Lock()
        # Held here because the event loop holds tasks weakly, and an unreferenced task may be collected half-way.
        self._retiring: set[asyncio.Task[None]] = set()
        self._superseded = False
        self._is_broken = False  # a task of the producer has ended
        self._closed = False

    async def open(self) -> AIOKafkaProducer:
        """The producer that holds the id, opened if needed.

        The first producer fences every other holder. A later one gives the identity of the one before, so that the
        broker refuses it if there is a newer holder.

        Raises:
            Superseded: there is a newer holder.
            BusUnavailable: no broker answers.
        """
        if self._producer is not None and self._is_broken:
            log.warning("opening a transactional id with a new producer", transactional_id=self._id)
            self._retire(self._producer)
        if self._producer is None:
            producer = self._make()
            # Before the start, when the broker decides. Without an identity, this producer would fence a newer holder.
            open_with_identity(producer, self._identity)
            try:
                # The first transaction on a new broker waits until the broker has made its topic for transactions.
                limits = self._limits
                await started(producer, self._settings, limits, timeout_s=limits.transaction_timeout_s)
            except BusUnavailable as error:
                if isinstance(error.__cause__, ProducerFenced):
                    self._superseded = True
                    raise self._newer_holder() from error.__cause__
                raise
            self._identity, self._producer = identity_of(producer), producer
            watch_tasks(producer, partial(self._on_broken, producer))
        return self._producer

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """Write records and offsets in one transaction; see the port.

        Raises:
            Superseded: a newer holder opened this transactional id.
            DeliveryUnknown: the deadline passed; it is not known whether the transaction was committed.
            BusUnavailable: no broker answered before the first write.
            BusError: the broker refused the transaction, or this publisher is closed; nothing was written.
        """
        async with self._lock:
            if self._superseded:
                raise self._newer_holder()
            if self._closed:
                raise BusError(f"transactional publisher {self._id} is closed; open a new one")
            producer = await self.open()
            # Before the transaction starts, so that a refused record or a missing topic leaves no transaction open.
            batches = await self._batches(producer, records)
            try:
                async with asyncio.timeout(self._limits.transaction_timeout_s):
                    await _transact(producer, batches, offsets or {}, group_id)
            except BaseException as error:
                # If one of the producer's tasks has ended, the library may raise any error by mistake.
                is_broken = self._is_broken
                # After a cancellation too: a late request of this producer must not end a later transaction.
                self._retire(producer)
                if isinstance(error, TimeoutError | KafkaError) or (is_broken and isinstance(error, Exception)):
                    raise await self._explained(error) from error
                raise

    async def _batches(
        self, producer: AIOKafkaProducer, records: Sequence[Outgoing]
    ) -> list[tuple[TopicPartition, BatchBuilder]]:
        """The records as batches, in order per partition. Refuses unknown partitions before the transaction starts."""
        if unknown := {record.topic for record in records} - self._counts.keys():
            self._counts |= await partitions_seen_by(producer.client, self._settings, unknown, self._limits)
        open_batches: dict[TopicPartition, BatchBuilder] = {}
        batches = []
        for record in records:
            tp = _partition_for(record, self._counts)
            # Only the newest batch of a partition takes records: in an older one, a record would overtake others.
            if tp not in open_batches or not append(open_batches[tp], record):
                open_batches[tp] = new_builder(
                    self._limits.max_batch_bytes, self._settings.compression_type, transactional=True
                )
                append(open_batches[tp], record)
                batches.append((tp, open_batches[tp]))
        return batches

    async def _explained(self, error: Exception) -> BusError | Superseded:
        """The error to raise for a failed transaction.

        After a fence, this asks the broker who holds the id, because the broker also fences a holder whose transaction
        timed out.
        """
        doing = f"committing a transaction of {self._id}"
        if _caused_by_fence(error):
            try:
                await self.open()
            except Superseded as newer:
                return newer
            except BusError:
                log.warning("cannot ask who holds a transactional id", transactional_id=self._id)
            # There is no newer holder, so the broker's own time-out fenced this one by raising the epoch.
            return DeliveryUnknown(f"{doing}: it timed out at the broker; commit the same records again")
        if isinstance(error, BrokerResponseError) and not error.retriable:
            with contextlib.suppress(BusError, Superseded):
                await self.open()  # ends the transaction, so that readers do not wait for it
            return BusError(f"{doing}: the broker refused it: {error!r}")
        return DeliveryUnknown(f"{doing}: no certain answer ({error!r}); commit the same records again")

    def _newer_holder(self) -> Superseded:
        return Superseded(f"expected to be the newest holder of {self._id}, superseded by a newer one: let it run")

    def _on_broken(self, producer: AIOKafkaProducer, error: BaseException | None) -> None:
        # Also called when a producer is stopped; by then it is no longer ``self._producer``. The next commit replaces a
        # broken producer and not this method, since the event loop may be ending all of its tasks.
        if producer is not self._producer or self._is_broken:
            return
        self._is_broken = True
        if error is not None:
            log.error("a transactional producer broke", transactional_id=self._id, error=str(error))

    def _retire(self, producer: AIOKafkaProducer) -> None:
        self._producer, self._counts, self._is_broken = None, {}, False
        task = asyncio.create_task(stop(producer, 0.0))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        """Release resources; bounded in time; idempotent. A running transaction ends first, or at its deadline."""
        # Set before taking the lock: commits that wait for the lock are refused, and only a running one is waited for.
        self._closed = True
        async with self._lock:
            producer, self._producer = self._producer, None
            if producer is not None:
                await stop(producer, STOP_PATIENCE_S)
            await asyncio.gather(*self._retiring)


async def _transact(
    producer: AIOKafkaProducer,
    batches: Iterable[tuple[TopicPartition, BatchBuilder]],
    offsets: Mapping[TopicPartition, int],
    group_id: str | None,
) -> None:
    await producer.begin_transaction()
    sent = [await producer.send_batch(batch, tp.topic, partition=tp.partition) for tp, batch in batches]
    # A refused batch has to raise before the commit, so that no record of the transaction is ever read.
    await asyncio.gather(*sent)
    if offsets and group_id is not None:
        named = {KafkaPartition(*tp): offset for tp, offset in offsets.items()}
        await producer.send_offsets_to_transaction(named, group_id)
    await producer.commit_transaction()


def _partition_for(record: Outgoing, counts: Mapping[str, int]) -> TopicPartition:
    count = counts.get(record.topic)
    if count is None:
        raise BusUnavailable(
            f"expected an existing topic, got {record.topic!r}; create it with `streamrl topics apply --run RUN`"
        )
    number = partition_of(record.key, count) if record.partition is None else record.partition
    if not 0 <= number < count:
        raise BusError(f"expected a partition below {count} of {record.topic}, got {number}")
    return TopicPartition(record.topic, number)


def _caused_by_fence(error: BaseException | None) -> bool:
    return any(isinstance(each, ProducerFenced) for each in causes_of(error))


async def open_transactional(
    make: Callable[[], AIOKafkaProducer], settings: KafkaSettings, transactional_id: str, limits: ClientLimits
) -> KafkaTransactionalPublisher:
    """An opened publisher. Every older holder of the id is fenced, and its open transaction ended.

    Raises:
        BusUnavailable: no broker answers.
    """
    publisher = KafkaTransactionalPublisher(make, settings, transactional_id, limits)
    # Fences now and not at the first commit: from here on, an older holder cannot write any more.
    await publisher.open()
    return publisher
