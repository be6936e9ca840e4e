"""The bus as the rooms see it: records, a publisher, a subscription, and the factory that opens them."""

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


# Offsets order the records of one partition; between partitions they say nothing.
class Position(NamedTuple):
    """Where a record was stored."""

    topic: str
    partition: int
    offset: int


class Record(NamedTuple):
    """One record as read. ``timestamp`` is in seconds since the epoch."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: bytes | None
    headers: Headers
    timestamp: float

    # On demand and not at reading: bytes of strangers must not keep the records behind them from being delivered.
    def message(self) -> Message:
        """Decode the value.

        Raises:
            WireError: the bytes are not one of our messages.
        """
        return decode(self.value, self.headers)


def message_of(record: Record, *, warn: bool = False) -> Message | None:
    """The record's message, or None for a tombstone and for bytes that are none of our messages.

    ``warn``: log such bytes, on topics with one writer; on the others the trainer dead-letters them.
    """
    if record.value is None:  # a tombstone: on a compacted topic it deletes its key
        return None
    try:
        return record.message()
    except WireError as error:
        if warn:
            log.warning("unreadable record ignored", topic=record.topic, offset=record.offset, error=str(error))
        return None


# The value is encoded before it is handed over, so that a message too large to be sent fails where it was made.
class Outgoing(NamedTuple):
    """One record to write. ``partition`` None: chosen from the key, as Kafka's default partitioner does."""

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

    # Two waits, one for space and one for the broker, so that a writer can have many records on their way.
    async def submit(self, record: Outgoing) -> "Future[Position]":
        """Hand a record over; waits only for buffer space. The future resolves when the broker has it.

        The future fails with ``DeliveryUnknown`` after the delivery deadline; ``BusError`` otherwise.
        """
        ...

    async def publish(self, record: Outgoing) -> Position:
        """``submit`` and wait until the broker has it.

        Raises:
            DeliveryUnknown: the deadline passed; the record may still arrive.
            BusError: the broker refused it.
        """
        ...

    async def flush(self) -> None:
        """Wait, within the delivery deadline, for everything submitted."""
        ...

    async def close(self) -> None:
        """Flush and release; bounded in time; idempotent."""
        ...


class Subscription(Protocol):
    """Reads assigned partitions in offset order per partition; the caller keeps the offsets."""

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records, or none after the time-out. Paused partitions deliver nothing.

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

    # For who looks up single records over one connection; a role reads on from where it began.
    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Deliver from these offsets next; the others stay where they are."""
        ...

    # Kafka's convention for every offset here: the next one wanted, that is, one behind the last one read.
    async def positions(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The next offset that ``poll`` will deliver, by partition; of all that it reads, or of those among them."""
        ...

    # Behind the last record that may be delivered: on Kafka an open transaction holds this end back.
    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The offset after the last record, by partition; of all that it reads, or of those among them."""
        ...

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The oldest offset that the broker still holds, by partition; of all that it reads, or of those among them."""
        ...

    # Nothing reads it back: whoever restarts names its offsets in ``subscribe``.
    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Tell the broker how far we are, for lag displays only; the checkpoint is the truth."""
        ...

    async def close(self) -> None:
        """Release; bounded in time; idempotent."""
        ...


class TransactionalPublisher(Protocol):
    """Writes records and offsets all together or not at all, as the one living holder of its transactional id."""

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """One short transaction. ``offsets`` are committed for ``group_id``, for lag displays only.

        Readers see the records soon after this returns; whoever opens the id next sees them at once.
        After ``DeliveryUnknown`` or ``BusUnavailable`` the same records may be committed again: a new transaction
        first ends the old one, whose records are then either all on the topics or none; readers tell repeats by what
        the records say.

        Raises:
            Superseded: a newer holder opened this transactional id; nothing of this call will ever be read.
            DeliveryUnknown: the deadline passed; it is not known whether the transaction was committed.
            BusError: the broker refused it; nothing was written.
        """
        ...

    async def close(self) -> None:
        """Release; bounded in time; idempotent."""
        ...


class GroupMember(Protocol):
    """One process of a consumer group: which partitions of a topic are its share. A ``Subscription`` reads them."""

    async def partitions(self) -> frozenset[TopicPartition]:
        """Its share at present; called again and again, since a member that does not ask for minutes loses it.

        The group shares out anew when members come and go. While it does, this stays what it was; two members may so
        have the same partition for a moment.

        Raises:
            BusUnavailable: no broker answers.
            BusError: the broker refuses.
        """
        ...

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note for the group how far its work is done: where another member goes on, and how far it lags.

        Raises:
            BusError: the broker does not take it; of a partition that is another member's by now, too.
        """
        ...

    async def close(self) -> None:
        """Leave the group, which shares out anew; bounded in time; idempotent."""
        ...


# With a mapping, reading begins at exactly these offsets or is refused; Kafka would jump to what it still holds.
Start = Literal["earliest", "latest"] | Mapping[TopicPartition, int]


class Bus(Protocol):
    """Opens publishers and subscriptions on one broker."""

    async def publisher(self, client_id: str) -> Publisher:
        """A started publisher."""
        ...

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        """A started transactional publisher. Opening it fences every older holder of the id, and ends its open
        transaction.

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
        """A started subscription that reads all partitions of the topics (or only those numbered).

        ``start`` may name offsets; partitions it leaves out start at the earliest record. When this returns with
        ``latest``, every record published afterwards will be delivered. ``group_id`` only names the commits.
        Records of aborted or open transactions are never delivered.

        Raises:
            BusUnavailable: no broker answered, or a topic does not exist.
            DataLossRefused: a named offset is not on the broker, or not any more.
        """
        ...

    async def join(self, topic: str, *, group_id: str, client_id: str) -> GroupMember:
        """A new member of a consumer group on a topic; it has no share before the group has one for it.

        Raises:
            BusUnavailable: no broker answered.
            TopicMissing: there is no such topic.
        """
        ...

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """How far a group has come in a topic, by partition; those of which it has said nothing are left out.

        Raises:
            BusUnavailable: no broker answered.
        """
        ...
