"""A bus in memory whose transactions end as a test says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.bus.memory import MemoryBus, MemoryTransactionalPublisher
from streamrl.bus.port import Outgoing, TopicPartition


@dataclass
class AnsweringBus(MemoryBus):
    """``answers``: the errors of the next commits; None, and no answer at all, is a good end.

    ``arrives``: whether a failed commit's records are on the topics all the same. ``role``: only the publishers whose
    ids end so are answered, and counted as ``opened``. ``commits``: how many records each commit had.
    """

    answers: list[Exception | None] = field(default_factory=list)
    arrives: bool = False
    role: str = ""
    opened: int = 0
    commits: list[int] = field(default_factory=list)

    async def transactional(self, transactional_id: str) -> MemoryTransactionalPublisher:
        plain = await super().transactional(transactional_id)
        if not transactional_id.endswith(self.role):
            return plain
        self.opened += 1
        return AnsweredPublisher(plain.publisher, plain.transactional_id, plain.epoch)


@dataclass
class AnsweredPublisher(MemoryTransactionalPublisher):
    """Asks its bus how each commit ends."""

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        bus = self.publisher.bus
        assert isinstance(bus, AnsweringBus)
        bus.commits.append(len(records))
        answer = bus.answers.pop(0) if bus.answers else None
        if answer is None or bus.arrives:
            await super().commit(records, offsets=offsets, group_id=group_id)
        if answer is not None:
            raise answer
