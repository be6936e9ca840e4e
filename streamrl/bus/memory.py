"""The in-memory bus, for tests and studies in one process. Its records are lost with the process."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from streamrl.bus.port import Outgoing, Position, Record, Start, TopicPartition
from streamrl.schemas.errors import BusError, DataLossRefused, Superseded, TopicMissing


@dataclass
class _Log:
    """The partitions of one topic."""

    partitions: list[list[Record]]


@dataclass
class MemoryBus:
    """Holds the logs. Create topics before use, as on a broker without automatic topic creation."""

    logs: dict[str, _Log] = field(default_factory=dict)
    committed: dict[tuple[str, TopicPartition], int] = field(default_factory=dict)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    epochs: dict[str, int] = field(default_factory=dict)
    groups: "dict[tuple[str, str], list[MemoryGroupMember]]" = field(default_factory=dict)

    def create_topic(self, name: str, partitions: int) -> None:
        """Add a topic; an existing one stays unchanged."""
        self.logs.setdefault(name, _Log([[] for _ in range(partitions)]))

    def log(self, topic: str) -> _Log:
        """The log of a topic.

        Raises:
            TopicMissing: the topic does not exist.
        """
        if topic not in self.logs:
            raise TopicMissing(f"expected an existing topic, got {topic!r}; create it first")
        return self.logs[topic]

    async def publisher(self, client_id: str) -> "MemoryPublisher":
        """A publisher on this bus."""
        return MemoryPublisher(self, client_id)

    async def transactional(self, transactional_id: str) -> "MemoryTransactionalPublisher":
        """A transactional publisher on this bus; older holders of the id are fenced."""
        epoch = self.epochs[transactional_id] = self.epochs.get(transactional_id, 0) + 1
        return MemoryTransactionalPublisher(await self.publisher(transactional_id), transactional_id, epoch)

    async def subscribe(
        self,
        topics: Iterable[str],
        *,
        client_id: str,
        start: Start = "earliest",
        partitions: Iterable[int] | None = None,
        group_id: str | None = None,
    ) -> "MemorySubscription":
        """A subscription on this bus; ``client_id`` is only a name."""
        wanted = None if partitions is None else set(partitions)
        assigned = [
            TopicPartition(topic, number)
            for topic in topics
            for number in range(len(self.log(topic).partitions))
            if wanted is None or number in wanted
        ]
        return MemorySubscription(self, {tp: self._start_of(tp, start) for tp in assigned}, group_id)

    async def join(self, topic: str, *, group_id: str, client_id: str) -> "MemoryGroupMember":
        """A new member of a group; the other members see the new shares when they ask next."""
        self.log(topic)
        member = MemoryGroupMember(self, topic, group_id)
        self.groups.setdefault((group_id, topic), []).append(member)
        return member

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """The offsets that the group's members committed last."""
        return {tp: offset for (group, tp), offset in self.committed.items() if (group, tp.topic) == (group_id, topic)}

    def _start_of(self, tp: TopicPartition, start: Start) -> int:
        if start == "earliest":
            return 0
        if start == "latest":
            return len(self.log(tp.topic).partitions[tp.partition])
        offset, end = start.get(tp, 0), len(self.log(tp.topic).partitions[tp.partition])
        if offset > end:
            raise DataLossRefused(
                f"expected offset {offset} of {tp.topic}/{tp.partition}, but the log ends at {end}",
                [(tp.topic, tp.partition, end, offset)],
            )
        return offset


@dataclass
class MemoryPublisher:
    """Appends to the logs at once."""

    bus: MemoryBus
    client_id: str
    closed: bool = False

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """Append, and return a future that is already resolved."""
        (position,) = await self.write([record])
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        future.set_result(position)  # no deadline: the outcome of an append is always known
        return future

    async def write(self, records: Sequence[Outgoing]) -> list[Position]:
        """Append all records or none, with no other writer's record in between."""
        if self.closed:
            raise BusError(f"publisher {self.client_id} is closed; open a new one")
        # All partitions are checked before the first append, so that a wrong one leaves no record behind. There is no
        # await until all are appended, so that no other record comes in between.
        numbers = [self._partition_for(record) for record in records]
        positions = [self._append(record, number) for record, number in zip(records, numbers, strict=True)]
        async with self.bus.arrived:
            self.bus.arrived.notify_all()
        return positions

    def _partition_for(self, record: Outgoing) -> int:
        count = len(self.bus.log(record.topic).partitions)
        number = _partition_of(record.key, count) if record.partition is None else record.partition
        if not 0 <= number < count:
            raise BusError(f"expected a partition below {count} of {record.topic}, got {number}")
        return number

    def _append(self, record: Outgoing, number: int) -> Position:
        log = self.bus.log(record.topic).partitions[number]
        position = Position(record.topic, number, len(log))
        log.append(Record(*position, record.key, record.value, record.headers, timestamp=time.time()))
        return position

    async def publish(self, record: Outgoing) -> Position:
        """Append a record."""
        return await (await self.submit(record))

    async def flush(self) -> None:
        """Return at once: no record is ever pending."""

    async def close(self) -> None:
        """Refuse further records."""
        self.closed = True


@dataclass
class MemoryTransactionalPublisher:
    """Appends all records of a transaction with no other record in between."""

    publisher: MemoryPublisher
    transactional_id: str
    epoch: int

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """Append the records, unless there is a newer holder of the id."""
        bus = self.publisher.bus
        # Like Kafka's producer epoch: the last one to open the id holds it, and older holders are refused.
        if bus.epochs[self.transactional_id] > self.epoch:
            raise Superseded(
                f"expected to be the newest holder of {self.transactional_id}, superseded by a newer one: let it run"
            )
        # Records first: a refused write raises here and leaves the offsets unchanged.
        await self.publisher.write(records)
        if offsets and group_id is not None:
            bus.committed.update({(group_id, tp): offset for tp, offset in offsets.items()})

    async def close(self) -> None:
        """Refuse further records."""
        await self.publisher.close()


@dataclass
class MemorySubscription:
    """Reads the logs from its own offsets."""

    bus: MemoryBus
    offsets: dict[TopicPartition, int]
    group_id: str | None
    paused: set[TopicPartition] = field(default_factory=set)
    closed: bool = False

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records; waits at most ``timeout_s`` for the first one."""
        if self.closed:
            raise BusError("the subscription is closed; open a new one")
        deadline = asyncio.get_running_loop().time() + timeout_s
        await asyncio.sleep(0)  # so that a caller that polls without waiting lets others write
        # Writers need this lock to notify. So no notification comes between the check and the wait and gets missed.
        async with self.bus.arrived:
            while not (batch := self._take(max_records)):
                remaining = deadline - asyncio.get_running_loop().time()
                if remaining <= 0:
                    return []
                try:
                    async with asyncio.timeout(remaining):
                        await self.bus.arrived.wait()
                except TimeoutError:
                    return []
        return batch

    def _take(self, max_records: int) -> list[Record]:
        batch: list[Record] = []
        for tp, offset in self.offsets.items():
            if tp not in self.paused:
                # Empty once the batch is full. The other partitions then keep their offsets for the next poll.
                taken = self.bus.log(tp.topic).partitions[tp.partition][offset : offset + max_records - len(batch)]
                self.offsets[tp] = offset + len(taken)
                batch += taken
        return batch

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop delivering from these partitions."""
        self.paused |= set(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these partitions again."""
        self.paused -= set(partitions)

    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions this subscription reads."""
        return frozenset(self.offsets)

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Deliver from these offsets next. Other partitions keep their positions."""
        self.offsets |= offsets

    async def positions(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The next offset that ``poll`` will deliver, by partition."""
        return {tp: self.offsets[tp] for tp in self._asked(partitions)}  # a copy, because the next poll changes it

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The offset after the last record, by partition."""
        return {tp: len(self.bus.log(tp.topic).partitions[tp.partition]) for tp in self._asked(partitions)}

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """Always 0: records are never deleted."""
        return dict.fromkeys(self._asked(partitions), 0)

    def _asked(self, partitions: Iterable[TopicPartition] | None) -> list[TopicPartition]:
        wanted = self.offsets if partitions is None else set(partitions)
        return [tp for tp in self.offsets if tp in wanted]

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Remember the offsets under the group's name."""
        assert self.group_id is not None, "commit needs a subscription with a group_id"
        self.bus.committed.update({(self.group_id, tp): offset for tp, offset in offsets.items()})

    async def close(self) -> None:
        """Refuse further polls."""
        self.closed = True


@dataclass(eq=False)
class MemoryGroupMember:
    """A group member. Partitions are dealt to members in the order in which they joined."""

    bus: MemoryBus
    topic: str
    group_id: str

    async def partitions(self) -> frozenset[TopicPartition]:
        """The member's share."""
        members = self.bus.groups[self.group_id, self.topic]
        if self not in members:
            raise BusError(f"a member that left the group {self.group_id} has no share; join again")
        count, number = len(members), members.index(self)
        return frozenset(
            TopicPartition(self.topic, each) for each in range(number, len(self.bus.log(self.topic).partitions), count)
        )

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Remember the offsets, if their partitions are in the member's share."""
        if not offsets.keys() <= await self.partitions():
            raise BusError(f"expected offsets of the member's own partitions in group {self.group_id}, got {offsets}")
        self.bus.committed.update({(self.group_id, tp): offset for tp, offset in offsets.items()})

    async def close(self) -> None:
        """Leave the group."""
        members = self.bus.groups[self.group_id, self.topic]
        if self in members:
            members.remove(self)


def _partition_of(key: str | None, count: int) -> int:
    # Not ``hash``: Python salts it differently in every process, and a run could not be repeated.
    return 0 if key is None else xxhash.xxh32_intdigest(key.encode()) % count
