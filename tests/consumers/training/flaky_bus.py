"""A bus on which a trainer's transactions end as a test says, and that counts how often they were opened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.bus.memory import MemoryBus, MemoryTransactionalPublisher
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.schemas.errors import BusError, Superseded


@dataclass
class FlakyBus(MemoryBus):
    """``answers``: of the next commits, before or after (``arrives``) their records are on the topic."""

    answers: list[BusError | Superseded | None] = field(default_factory=list)
    arrives: bool = False
    opened: int = 0

    async def transactional(self, transactional_id: str) -> MemoryTransactionalPublisher:
        found = await super().transactional(transactional_id)
        if not transactional_id.endswith(".trainer"):
            return found
        self.opened += 1
        return FlakyTransactions(found.publisher, found.transactional_id, found.epoch)


@dataclass
class FlakyTransactions(MemoryTransactionalPublisher):
    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        bus = self.publisher.bus
        assert isinstance(bus, FlakyBus)
        answer = bus.answers.pop(0) if bus.answers else None
        if answer is None or bus.arrives:
            await super().commit(records, offsets=offsets, group_id=group_id)
        if answer is not None:
            raise answer
