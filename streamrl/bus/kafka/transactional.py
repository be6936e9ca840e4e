"""Kafka transactions, one short one a commit. Knows neither messages nor our topics.

Invariants:
- a producer that did not end a transaction for certain is discarded, because aiokafka could end a later one with a
  late request;
- a_broken_transactional_producer_is_replaced: when one of its tasks ends, the next commit opens the id anew;
- whether there is a newer holder of the id is the broker's word, never guessed from a time-out;
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
from streamrl.bus.kafka.publisher import append, new_builder, partition_of
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown, Superseded, causes_of

STOP_PATIENCE_S = 1.0  # a closed publisher has nothing on its way: only connections are closed

log = structlog.get_logger()


class KafkaTransactionalPublisher:
    """``bus.port.TransactionalPublisher``. Opened by ``open_transactional``."""

    def __init__(self, make: Callable[[], AIOKafkaProducer], settings: KafkaSettings, transactional_id: str) -> None:
        self._make = make
        self._settings = settings
        self._id = transactional_id
        self._identity: ProducerIdentity = NO_IDENTITY
        self._producer: AIOKafkaProducer | None = None
        self._counts: dict[str, int] = {}
        # A producer can have one transaction open. ``close`` takes the lock too, and so waits for the last.
        self._lock = asyncio.Lock()
        # Held here because the event loop holds tasks weakly: one that nobody knows may be collected half-way.
        self._retiring: set[asyncio.Task[None]] = set()
        self._superseded = False
        self._is_broken = False  # a task of the producer has ended
        self._closed = False

    async def open(self) -> AIOKafkaProducer:
        """The producer that holds the id. The first fences every other holder; a later one says who we were.

        Raises:
            Superseded: there is a newer holder.
            BusUnavailable: no broker answers.
        """
        if self._producer is not None and self._is_broken:
            log.warning("opening a transactional id with a new producer", transactional_id=self._id)
            self._retire(self._producer)
        if self._producer is None:
            producer = self._make()
            # Before it is started, which is when the broker decides: without an identity we would fence a newer holder.
            open_with_identity(producer, self._identity)
            try:
                # The first transaction of a broker's life waits until it has made the topic that it keeps them in.
                await started(producer, self._settings, self._settings.transaction_timeout_ms / 1000)
            except BusUnavailable as error:
                if isinstance(error.__cause__, ProducerFenced):
                    self._superseded = True
                    raise self._newer_holder() from error.__cause__
                raise
            self._identity, self._producer = identity_of(producer), producer
            watch_tasks(producer, partial(self._broken, producer))
        return self._producer

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """One transaction; see the port.

        Raises:
            Superseded: a newer holder opened this transactional id.
            DeliveryUnknown: the deadline passed; it is not known whether the transaction was committed.
            BusUnavailable: no broker answered before anything was written.
            BusError: the broker refused it, or we are closed; nothing was written.
        """
        async with self._lock:
            if self._superseded:
                raise self._newer_holder()
            if self._closed:
                raise BusError(f"transactional publisher {self._id} is closed; open a new one")
            producer = await self.open()
            # Before the transaction begins, so that a refused record or a missing topic leaves none open.
            batches = await self._batches(producer, records)
            try:
                async with asyncio.timeout(self._settings.transaction_timeout_ms / 1000):
                    await _transact(producer, batches, offsets or {}, group_id)
            except BaseException as error:
                # Where one of its tasks ended, the error may be any that the library makes by mistake.
                is_broken = self._is_broken
                # Cancellation included: a late request of this producer must not end a later transaction.
                self._retire(producer)
                if isinstance(error, TimeoutError | KafkaError) or (is_broken and isinstance(error, Exception)):
                    raise await self._meaning_of(error) from error
                raise

    async def _batches(
        self, producer: AIOKafkaProducer, records: Sequence[Outgoing]
    ) -> list[tuple[TopicPartition, BatchBuilder]]:
        """The records as batches, in order per partition. Refuses unknown partitions before anything is begun."""
        if unknown := {record.topic for record in records} - self._counts.keys():
            self._counts |= await partitions_seen_by(producer.client, self._settings, unknown)
        open_batches: dict[TopicPartition, BatchBuilder] = {}
        batches = []
        for record in records:
            tp = _partition_for(record, self._counts)
            # Only the newest batch of a partition takes records: an older one would let a later record overtake.
            if tp not in open_batches or not append(open_batches[tp], record):
                open_batches[tp] = new_builder(
                    self._settings.max_batch_bytes, self._settings.compression_type, transactional=True
                )
                append(open_batches[tp], record)
                batches.append((tp, open_batches[tp]))
        return batches

    async def _meaning_of(self, error: Exception) -> BusError | Superseded:
        """The error to raise for a failed transaction.

        On a fence the broker is asked who holds the id: it also fences a holder whose transaction timed out.
        """
        doing = f"committing a transaction of {self._id}"
        if _caused_by_fence(error):
            try:
                await self.open()
            except Superseded as newer:
                return newer
            except BusError:
                log.warning("cannot ask who holds a transactional id", transactional_id=self._id)
            # Nobody newer is known: then it was the broker's own time-out that fenced us, by raising the epoch.
            return DeliveryUnknown(f"{doing}: it timed out at the broker; commit the same records again")
        if isinstance(error, BrokerResponseError) and not error.retriable:
            with contextlib.suppress(BusError, Superseded):
                await self.open()  # which ends the transaction, so that readers do not wait for it
            return BusError(f"{doing}: the broker refused it: {error!r}")
        return DeliveryUnknown(f"{doing}: no certain answer ({error!r}); commit the same records again")

    def _newer_holder(self) -> Superseded:
        return Superseded(f"expected to be the newest holder of {self._id}, superseded by a newer one: let it go on")

    def _broken(self, producer: AIOKafkaProducer, error: BaseException | None) -> None:
        # Also called when it is stopped; then it is not ours any more. It is replaced at the next commit and not here,
        # since the event loop may be ending all of its tasks.
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
        """Release; bounded in time; idempotent. A transaction under way ends first, or at its deadline."""
        # Before the lock: commits that wait for it are refused, and only the one under way is waited for.
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
    # A batch that was refused has to raise before the commit, so that nothing of the transaction is ever read.
    await asyncio.gather(*sent)
    if offsets and group_id is not None:
        named = {KafkaPartition(*tp): offset for tp, offset in offsets.items()}
        await producer.send_offsets_to_transaction(named, group_id)
    await producer.commit_transaction()


def _partition_for(record: Outgoing, counts: Mapping[str, int]) -> TopicPartition:
    count = counts.get(record.topic)
    if count is None:
        raise BusUnavailable(
            f"expected an existing topic, got {record.topic!r}; create it with `streamrl topics apply`"
        )
    number = partition_of(record.key, count) if record.partition is None else record.partition
    if not 0 <= number < count:
        raise BusError(f"expected a partition below {count} of {record.topic}, got {number}")
    return TopicPartition(record.topic, number)


def _caused_by_fence(error: BaseException | None) -> bool:
    return any(isinstance(each, ProducerFenced) for each in causes_of(error))


async def open_transactional(
    make: Callable[[], AIOKafkaProducer], settings: KafkaSettings, transactional_id: str
) -> KafkaTransactionalPublisher:
    """Opened; every older holder of the id is fenced, and its open transaction ended.

    Raises:
        BusUnavailable: no broker answers.
    """
    publisher = KafkaTransactionalPublisher(make, settings, transactional_id)
    # Fences at once, not at the first commit: from here on an older holder can write nothing more.
    await publisher.open()
    return publisher
