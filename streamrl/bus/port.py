"""The bus as other packages use it: records, publishers, subscriptions, and the factory that opens them."""

from asyncio import Future
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, Self

import structlog

from streamrl.schemas.codec import Headers, decode, encode, headers_of
from streamrl.schemas.errors import WireError
from streamrl.schemas.messages import Message

log = structlog.get_logger()


class TopicPartition(NamedTuple):
    """One partition of a topic (full name, with the run's prefix)."""

    topic: str
    partition: int


# Offsets order the records of one partition. They do not order records of different partitions.
class Position(NamedTuple):
    """The place where a record is stored."""

    topic: str
    partition: int
    offset: int


class Record(NamedTuple):
    """One record that was read. ``timestamp`` is in seconds since the epoch."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: bytes | None
    headers: Headers
    timestamp: float

    # Decoded on demand and not while reading: undecodable bytes must not block the delivery of later records.
    def message(self) -> Message:
        """Decode the value.

        Raises:
            WireError: the bytes are no valid message.
        """
        return decode(self.value, self.headers)


def message_of(record: Record, *, warn: bool = False) -> Message | None:
    """The record's message; None for a tombstone and for bytes that are no valid message.

    ``warn``: log invalid bytes. Use it on topics with one writer; on the others the trainer writes dead letters.
    """
    if record.value is None:  # a tombstone, which deletes its key on a compacted topic
        return None
    try:
        return record.message()
    except WireError as error:
        if warn:
            log.warning("unreadable record ignored", topic=record.topic, offset=record.offset, error=str(error))
        return None


# The value is encoded before it is submitted, so that a message that is too large fails where it was made.
class Outgoing(NamedTuple):
    """One record to write. ``partition`` None: the key selects it, as in Kafka's default partitioner."""

    topic: str
    value: bytes | None
    key: str | None
    partition: int | None = None
    headers: Headers = ()

    @classmethod
    def of(cls, topic: str, message: Message, *, key: str | None, partition: int | None = None) -> Self:
        """The record that carries a message."""
        return cls(topic, encode(message), key, partition, headers_of(message))


class Publisher(Protocol):
    """Writes records, idempotently and in order per partition."""

    # Two waits, one for buffer space and one for the broker, so that a writer can have many records in flight.
    async def submit(self, record: Outgoing) -> "Future[Position]":
        """Put a record into the buffer, waiting only for space. The future resolves when the broker has the record.

        The future fails with ``DeliveryUnknown`` after the delivery deadline, and with ``BusError`` for other errors.
        """
        ...

    async def publish(self, record: Outgoing) -> Position:
        """``submit`` a record and wait until the broker has it.

        Raises:
            DeliveryUnknown: the deadline passed; the record may still arrive.
            BusError: the broker refused the record.
        """
        ...

    async def flush(self) -> None:
        """Wait, within the delivery deadline, for all submitted records."""
        ...

    async def close(self) -> None:
        """Flush and release resources; bounded in time; idempotent."""
        ...


class Subscription(Protocol):
    """Reads assigned partitions in offset order per partition; the caller keeps the offsets."""

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records; an empty list after the time-out. Paused partitions deliver nothing.

        Raises:
            DataLossRefused: retention deleted the next record before it was read.
            BusError: the subscription is closed, or the broker refuses.
        """
        ...

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop delivering from these partitions."""
        ...

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these partitions again."""
        ...

    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions this subscription reads."""
        ...

    # For looking up single records over one connection. A role reads on from its start and never seeks.
    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Deliver from these offsets next. Other partitions keep their positions."""
        ...

    # Every offset here follows Kafka's convention: the next offset wanted, which is one after the last one read.
    async def positions(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The next offset that ``poll`` will deliver, by partition.

        ``partitions`` limits the answer to those of them that this subscription reads.
        """
        ...

    # The end after the last record that may be delivered. On Kafka, an open transaction holds this end back.
    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The offset after the last record, by partition; ``partitions`` as in ``positions``."""
        ...

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The oldest offset that the broker still holds, by partition; ``partitions`` as in ``positions``."""
        ...

    # No process reads committed offsets back: a restarted process names its offsets in ``subscribe``.
    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets to the broker, for lag displays only. The checkpoint decides where reading continues."""
        ...

    async def close(self) -> None:
        """Release resources; bounded in time; idempotent."""
        ...


class TransactionalPublisher(Protocol):
    """Writes records and offsets all together or not at all, as the only valid holder of its transactional id."""

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """Write records in one short transaction. ``offsets`` are committed for ``group_id``, for lag displays only.

        Readers see the records soon after this returns. The next process that opens the id sees them at once.

        After ``DeliveryUnknown`` or ``BusUnavailable`` the same records may be committed again. A new transaction first
        ends the old one, whose records are then either all on the topics or not at all. Readers recognise repeats by
        the records' content.

        Raises:
            Superseded: a newer holder opened this transactional id; no record of this call will ever be read.
            DeliveryUnknown: the deadline passed; it is not known whether the transaction was committed.
            BusError: the broker refused the transaction; nothing was written.
        """
        ...

    async def close(self) -> None:
        """Release resources; bounded in time; idempotent."""
        ...


class GroupMember(Protocol):
    """One member of a consumer group. It knows its share of a topic's partitions; a ``Subscription`` reads them."""

    async def partitions(self) -> frozenset[TopicPartition]:
        """The member's present share. Call it regularly: a member that does not ask for minutes loses its share.

        The group rebalances when members join or leave. During a rebalance this keeps the old share, so two members may
        have the same partition for a moment.

        Raises:
            BusUnavailable: no broker answers.
            BusError: the broker refuses.
        """
        ...

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit the group's progress: the offsets from which another member continues, and from which lag is counted.

        Raises:
            BusError: the broker refuses, for example because a partition belongs to another member now.
        """
        ...

    async def close(self) -> None:
        """Leave the group, which then rebalances; bounded in time; idempotent."""
        ...


# With a mapping, reading starts at exactly these offsets or is refused. Kafka itself would skip missing records.
Start = Literal["earliest", "latest"] | Mapping[TopicPartition, int]


class Bus(Protocol):
    """Opens publishers and subscriptions on one broker."""

    async def publisher(self, client_id: str) -> Publisher:
        """A started publisher."""
        ...

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        """A started transactional publisher.

        Opening it fences every older holder of the id and ends that holder's open transaction.

        Raises:
            BusUnavailable: no broker answers.
        """
        ...

    async def subscribe(
        self,
        topics: Iterable[str],
        *,
        client_id: str,
        start: Start = "earliest",
        partitions: Iterable[int] | None = None,
        group_id: str | None = None,
    ) -> Subscription:
        """A started subscription to all partitions of the topics, or only to those numbered in ``partitions``.

        ``start`` may name offsets; partitions without one start at the earliest record. With ``latest``, every record
        that is published after this returns will be delivered. ``group_id`` is only the name for commits. Records of
        aborted or open transactions are never delivered.

        Raises:
            BusUnavailable: no broker answered, or a topic does not exist.
            DataLossRefused: the broker does not hold a named offset, or no longer holds it.
        """
        ...

    async def join(self, topic: str, *, group_id: str, client_id: str) -> GroupMember:
        """A new member of a consumer group on a topic. Its share is empty until the group assigns one.

        Raises:
            BusUnavailable: no broker answered.
            TopicMissing: the topic does not exist.
        """
        ...

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """A group's committed offsets in a topic, by partition. Partitions without a commit are left out.

        Raises:
            BusUnavailable: no broker answered.
        """
        ...
