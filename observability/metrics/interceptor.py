"""A bus that counts what passes, and shows it to whoever wants to see. Changes nothing of it.

Invariant measuring_never_fails: an observer that raises is dropped and told of once; the record goes its way.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from bus.interceptors import BusInterceptor, PublisherInterceptor, SubscriptionInterceptor, TransactionalInterceptor
from bus.port import Outgoing, Position, Publisher, Record, Subscription, TopicPartition, TransactionalPublisher
from observability.metrics.families import Meters
from schemas.codec import Headers, decode
from schemas.errors import BusError, WireError
from schemas.messages import Message

See = Callable[[bytes | None, Headers], None]
"""Shown the value and headers of a record."""
log = structlog.get_logger()


def of_message(take: Callable[[Message], None]) -> See:
    """Shown the message in it; what does not decode is passed over."""

    def see(value: bytes | None, headers: Headers) -> None:
        try:
            message = decode(value, headers)
        except WireError:
            return
        take(message)

    return see


@dataclass
class Sight:
    """``published`` and ``consumed``: who sees the records of a topic (full name)."""

    meters: Meters
    published: dict[str, See] = field(default_factory=dict)
    consumed: dict[str, See] = field(default_factory=dict)

    def sent(self, record: Outgoing) -> None:
        """A record was handed over."""
        topic = self._short(record.topic)
        self.meters.count("bus_published_records", topic)
        self.meters.count("bus_published_bytes", topic, by=len(record.value or b""))
        self._show(self.published, record.topic, record.value, record.headers)

    def answered(self, topic: str, seconds: float, error: BaseException | None) -> None:
        """The broker answered, or it is certain or to be feared that it will not."""
        if error is None:
            self.meters.observe(seconds, "bus_publish_duration_seconds", self._short(topic))
        elif isinstance(error, BusError):
            self.meters.count("bus_publish_failures", self._short(topic), type(error).__name__)

    def read(self, records: Sequence[Record]) -> None:
        """Records were read: counted together, because counting each would cost as much as handing it on."""
        totals: dict[str, list[int]] = {}
        for record in records:
            total = totals.setdefault(record.topic, [0, 0])
            total[0] += 1
            total[1] += len(record.value or b"")
            self._show(self.consumed, record.topic, record.value, record.headers)
        for name, (count, size) in totals.items():
            topic = self._short(name)
            self.meters.count("bus_consumed_records", topic, by=count)
            self.meters.count("bus_consumed_bytes", topic, by=size)

    def _short(self, topic: str) -> str:
        return topic.removeprefix(f"{self.meters.run}.")

    def _show(self, observers: dict[str, See], topic: str, value: bytes | None, headers: Headers) -> None:
        see = observers.get(topic)
        if see is None:
            return
        try:
            see(value, headers)
        except Exception:
            log.exception("a topic is not measured any more", topic=topic)
            del observers[topic]


@dataclass
class MeasuredBus(BusInterceptor):
    """``bus.port.Bus`` around another one."""

    sight: Sight

    def around_publisher(self, inner: Publisher) -> Publisher:
        """See ``BusInterceptor``."""
        return _Publisher(inner, self.sight)

    def around_transactional(self, inner: TransactionalPublisher) -> TransactionalPublisher:
        """See ``BusInterceptor``."""
        return _Transactional(inner, self.sight)

    def around_subscription(self, inner: Subscription) -> Subscription:
        """See ``BusInterceptor``."""
        return _Subscription(inner, self.sight)


@dataclass
class _Publisher(PublisherInterceptor):
    sight: Sight

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        began = time.perf_counter()
        future = await self.inner.submit(record)
        self.sight.sent(record)

        def settled(done: "asyncio.Future[Position]") -> None:
            error = None if done.cancelled() else done.exception()
            self.sight.answered(record.topic, time.perf_counter() - began, error)

        future.add_done_callback(settled)
        return future


@dataclass
class _Transactional(TransactionalInterceptor):
    sight: Sight

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        began, topics = time.perf_counter(), {record.topic for record in records}
        try:
            await self.inner.commit(records, offsets=offsets, group_id=group_id)
        except BusError as error:
            for topic in topics:
                self.sight.answered(topic, 0.0, error)
            raise
        for record in records:
            self.sight.sent(record)
        for topic in topics:
            self.sight.answered(topic, time.perf_counter() - began, None)


@dataclass
class _Subscription(SubscriptionInterceptor):
    sight: Sight

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        records = await self.inner.poll(max_records=max_records, timeout_s=timeout_s)
        self.sight.read(records)
        return records
