"""The broker's side: logs with transactions, markers and retention. It keeps what Kafka promises and no more.

Promises: offsets of a partition are given once and in order; an appended record stays (retention aside); a reader
sees no record of an open or aborted transaction, and nothing behind an open one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from streamrl.bus.port import Outgoing, Record, TopicPartition
from streamrl.schemas.errors import BusUnavailable


class Fate(Enum):
    """What became of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False)
class Transaction:
    """Records written under one epoch of a transactional id."""

    transactional_id: str
    epoch: int
    fate: Fate = Fate.OPEN
    written: list[TopicPartition] = field(default_factory=list)
    offsets: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    ended: "asyncio.Future[None] | None" = None


@dataclass(slots=True)
class Slot:
    """One offset: a record, or (none) the marker that ends a transaction. ``at``: when it really came."""

    record: Record | None
    transaction: Transaction | None = None
    at: float = 0.0


@dataclass(eq=False)
class Log:
    """One partition. ``first``: the oldest offset held; ``stable``: nothing from here on may be read yet."""

    tp: TopicPartition
    slots: list[Slot] = field(default_factory=list)
    first: int = 0
    waiting: "dict[asyncio.Future[None], None]" = field(default_factory=dict)
    has_transactions: bool = False
    open: dict[Transaction, int] = field(default_factory=dict)

    @property
    def stable(self) -> int:
        """The offset behind the last one that may be read."""
        return min(self.open.values()) if self.open else len(self.slots)

    def read(self, offset: int, most: int) -> tuple[list[Record], int]:
        """Committed records from an offset on, and the offset behind what was looked at."""
        if not self.has_transactions:
            found = self.slots[offset : offset + most]
            return [slot.record for slot in found if slot.record is not None], offset + len(found)
        records: list[Record] = []
        end = self.stable
        while offset < end and len(records) < most:
            slot = self.slots[offset]
            if slot.record is not None and (slot.transaction is None or slot.transaction.fate is Fate.COMMITTED):
                records.append(slot.record)
            offset += 1
        return records, offset

    def wake(self) -> None:
        """Something can be read that could not be before."""
        for future in self.waiting:
            if not future.done():
                future.set_result(None)


@dataclass
class Broker:
    """``clock``: virtual seconds. ``is_up`` false: nobody gets an answer."""

    clock: Callable[[], float]
    topics: dict[str, list[Log]] = field(default_factory=dict)
    committed: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    open: dict[str, Transaction] = field(default_factory=dict)
    gone: dict[tuple[int, int], float] = field(default_factory=dict)
    is_up: bool = True

    def create_topic(self, name: str, partitions: int) -> None:
        """Add a topic; existing ones are left alone."""
        self.topics.setdefault(name, [Log(TopicPartition(name, number)) for number in range(partitions)])

    def logs(self, topic: str) -> list[Log]:
        """The partitions of a topic.

        Raises:
            BusUnavailable: there is no such topic.
        """
        if topic not in self.topics:
            raise BusUnavailable(f"expected an existing topic, got {topic!r}; create it first")
        return self.topics[topic]

    def log(self, tp: TopicPartition) -> Log:
        """One partition."""
        return self.topics[tp.topic][tp.partition]

    def append(
        self,
        tp: TopicPartition,
        outgoing: Outgoing,
        transaction: Transaction | None = None,
        stamp: float | None = None,
    ) -> int:
        """Store a record; its offset. ``stamp``: what its writer's clock said."""
        log, at = self.log(tp), self.clock()
        offset = len(log.slots)
        record = Record(*tp, offset, outgoing.key, outgoing.value, outgoing.headers, at if stamp is None else stamp)
        log.slots.append(Slot(record, transaction, at))
        if transaction is None:
            log.wake()
        else:
            log.has_transactions = True
            log.open.setdefault(transaction, offset)
            transaction.written.append(tp)
        return offset

    def fence(self, transactional_id: str) -> int:
        """A new epoch of a transactional id; an open transaction of an older one is aborted."""
        if (transaction := self.open.get(transactional_id)) is not None:
            self.end(transaction, Fate.ABORTED)
        epoch = self.epochs[transactional_id] = self.epochs.get(transactional_id, 0) + 1
        return epoch

    def begin(self, transactional_id: str, epoch: int) -> Transaction:
        """Open a transaction under the present epoch."""
        transaction = self.open[transactional_id] = Transaction(transactional_id, epoch)
        return transaction

    def end(self, transaction: Transaction, fate: Fate) -> None:
        """Commit or abort; a transaction that has ended stays as it is."""
        if transaction.fate is not Fate.OPEN:
            return
        transaction.fate = fate
        if transaction.ended is not None and not transaction.ended.done():
            transaction.ended.set_result(None)
        if self.open.get(transaction.transactional_id) is transaction:
            del self.open[transaction.transactional_id]
        if fate is Fate.COMMITTED:
            self.committed.update(transaction.offsets)
        for tp in dict.fromkeys(transaction.written):
            log = self.log(tp)
            log.slots.append(Slot(None, transaction))
            del log.open[transaction]
            log.wake()

    def restart(self) -> None:
        """The broker is there again; whoever waits for records looks again."""
        self.is_up = True
        for logs in self.topics.values():
            for log in logs:
                log.wake()

    def expire(self, tp: TopicPartition, before: int) -> None:
        """Retention deletes the records before an offset: no reader can have them any more (the judges still can)."""
        log = self.log(tp)
        for offset in range(log.first, min(before, len(log.slots))):
            self.gone[tp.partition, offset] = self.clock()
        log.first = max(log.first, min(before, len(log.slots)))
        log.wake()


def partition_of(key: str | None, count: int) -> int:
    """The partition that a key goes to."""
    return 0 if key is None else xxhash.xxh32_intdigest(key.encode()) % count


def committed(log: Log) -> list[Record]:
    """Every record of a partition that was ever readable and is still held."""
    return [
        slot.record
        for slot in log.slots
        if slot.record is not None and (slot.transaction is None or slot.transaction.fate is Fate.COMMITTED)
    ]
