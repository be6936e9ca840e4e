"""A bus around another one, and its clients around that one's: all passes unchanged until somebody overrides a part.

Knows neither what is looked for nor why. Whoever looks on overrides ``submit``, ``commit`` or ``poll``, and says in
``BusInterceptor`` which clients it puts around those of the inner bus.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bus.port import (
    Bus,
    Outgoing,
    Position,
    Publisher,
    Record,
    Start,
    Subscription,
    TopicPartition,
    TransactionalPublisher,
)


@dataclass
class PublisherInterceptor:
    """``bus.port.Publisher``; every record passes ``submit``."""

    inner: Publisher

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """See the port."""
        return await self.inner.submit(record)

    async def publish(self, record: Outgoing) -> Position:
        """See the port."""
        return await (await self.submit(record))

    async def flush(self) -> None:
        """See the port."""
        await self.inner.flush()

    async def close(self) -> None:
        """See the port."""
        await self.inner.close()


@dataclass
class TransactionalInterceptor:
    """``bus.port.TransactionalPublisher``."""

    inner: TransactionalPublisher

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """See the port."""
        await self.inner.commit(records, offsets=offsets, group_id=group_id)

    async def close(self) -> None:
        """See the port."""
        await self.inner.close()


@dataclass
class SubscriptionInterceptor:
    """``bus.port.Subscription``; every record read passes ``poll``."""

    inner: Subscription

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """See the port."""
        return await self.inner.poll(max_records=max_records, timeout_s=timeout_s)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """See the port."""
        self.inner.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """See the port."""
        self.inner.resume(partitions)

    def partitions(self) -> frozenset[TopicPartition]:
        """See the port."""
        return self.inner.partitions()

    async def positions(self) -> dict[TopicPartition, int]:
        """See the port."""
        return await self.inner.positions()

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """See the port."""
        return await self.inner.end_offsets()

    async def beginning_offsets(self) -> dict[TopicPartition, int]:
        """See the port."""
        return await self.inner.beginning_offsets()

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """See the port."""
        await self.inner.commit(offsets)

    async def close(self) -> None:
        """See the port."""
        await self.inner.close()


@dataclass
class BusInterceptor:
    """``bus.port.Bus``; ``around_…`` are given each new client of the inner bus."""

    bus: Bus

    def around_publisher(self, inner: Publisher) -> Publisher:
        """What is handed out for it."""
        return inner

    def around_transactional(self, inner: TransactionalPublisher) -> TransactionalPublisher:
        """What is handed out for it."""
        return inner

    def around_subscription(self, inner: Subscription) -> Subscription:
        """What is handed out for it."""
        return inner

    async def publisher(self, client_id: str) -> Publisher:
        """See the port."""
        return self.around_publisher(await self.bus.publisher(client_id))

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        """See the port."""
        return self.around_transactional(await self.bus.transactional(transactional_id))

    async def subscribe(
        self,
        topics: Iterable[str],
        *,
        client_id: str,
        start: Start = "earliest",
        partitions: Iterable[int] | None = None,
        group_id: str | None = None,
    ) -> Subscription:
        """See the port."""
        return self.around_subscription(
            await self.bus.subscribe(topics, client_id=client_id, start=start, partitions=partitions, group_id=group_id)
        )
