"""A bus in memory with a slow broker. It knows which clients were opened and never closed."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from streamrl.bus.memory import MemoryBus, MemorySubscription, MemoryTransactionalPublisher
from streamrl.bus.port import Outgoing, Position, Record, TopicPartition
from streamrl.schemas.errors import DeliveryUnknown
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import Topic
from tests.fakes.topics import create_topics

LONGEST_ANSWER_S = 0.01
"""The broker answers each request within this time."""
IN_DOUBT = 0.05
"""Share of the transactions that get no answer. The broker commits half of these."""


@dataclass
class SlowBus(MemoryBus):
    """Takes a moment to open, commit and close, so that a stop or a cancellation can come in the middle of each.

    Records of the load are written at once. ``run``: the run whose topics the bus has. ``opened``: every client that
    was opened, with a name for messages.
    """

    random: Random = field(default_factory=Random)
    run: str = "r"
    opened: list[tuple[str, MemorySubscription | MemoryTransactionalPublisher]] = field(default_factory=list)

    def __post_init__(self) -> None:
        create_topics(self, self.run)

    async def answer(self) -> None:
        """Wait for the broker."""
        await asyncio.sleep(self.random.uniform(0, LONGEST_ANSWER_S))

    async def transactional(self, transactional_id: str) -> "SlowTransactionalPublisher":
        await self.answer()
        plain = await super().transactional(transactional_id)
        made = SlowTransactionalPublisher(plain.publisher, plain.transactional_id, plain.epoch, self)
        self.opened.append((f"the publisher {transactional_id}", made))
        return made

    async def subscribe(self, topics: Iterable[str], **options: Any) -> "SlowSubscription":
        names = list(topics)
        await self.answer()
        plain = await super().subscribe(names, **options)
        made = SlowSubscription(self, plain.offsets, plain.group_id)
        self.opened.append((f"the subscription to {', '.join(names)}", made))
        return made

    def left_open(self) -> list[str]:
        """One sentence for each client that was never closed."""
        return [
            f"{name} is left open"
            for name, client in self.opened
            if not (client.closed if isinstance(client, MemorySubscription) else client.publisher.closed)
        ]

    async def send(
        self, topic: Topic, message: Message, key: str = "k", partition: int | None = None, scope: str | None = None
    ) -> Position:
        """Publish a message of the load."""
        name = topic.full_name(scope or self.run)
        return await (await self.publisher("the load")).publish(
            Outgoing.of(name, message, key=key, partition=partition)
        )


@dataclass
class SlowTransactionalPublisher(MemoryTransactionalPublisher):
    bus: SlowBus

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        is_in_doubt, random = self.bus.random.random() < IN_DOUBT, self.bus.random
        await self.bus.answer()
        if not is_in_doubt or random.random() < 0.5:
            await super().commit(records, offsets=offsets, group_id=group_id)
        await self.bus.answer()
        if is_in_doubt:
            raise DeliveryUnknown("expected the broker's answer to a transaction, got none: commit it again")

    async def close(self) -> None:
        # Closed before the wait, as the clients of Kafka are: a second cancellation does not open them again.
        await super().close()
        await self.bus.answer()


@dataclass
class SlowSubscription(MemorySubscription):
    bus: SlowBus

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        await self.bus.answer()
        return await super().end_offsets(partitions)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        await self.bus.answer()
        return await super().beginning_offsets(partitions)

    async def close(self) -> None:
        await super().close()
        await self.bus.answer()


@dataclass
class Reader:
    """Reads each record of a topic once, in the order of its partition. ``partition``: None reads all partitions."""

    bus: MemoryBus
    topic: str
    partition: int | None = None
    read: dict[int, int] = field(default_factory=dict)

    def new(self) -> list[Record]:
        """The records that arrived since the last call."""
        found = []
        for number, log in enumerate(self.bus.log(self.topic).partitions):
            if self.partition in (None, number):
                found += log[self.read.get(number, 0) :]
                self.read[number] = len(log)
        return found
