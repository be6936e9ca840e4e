"""A bus that writes trace contexts into headers, and shows a story what passes. Knows no topic and no exporter.

Invariant tracing_never_fails: a story that raises is told of once and asked no more; the record goes its way.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from bus.interceptors import BusInterceptor, PublisherInterceptor, SubscriptionInterceptor, TransactionalInterceptor
from bus.port import Outgoing, Position, Publisher, Record, Subscription, TopicPartition, TransactionalPublisher
from observability.tracing.context import Context, context_of

log = structlog.get_logger()


class Stored(NamedTuple):
    """The broker has a record; the offset is not known of records in transactions. Times: seconds since the epoch."""

    topic: str
    partition: int | None
    offset: int | None
    began_s: float
    ended_s: float


class Passage(NamedTuple):
    """What a record shall carry, if anything, and who is told when the broker has it."""

    context: Context | None
    stored: Callable[[Stored], None]


class Story(Protocol):
    """What one role does, told in spans. ``writes`` and ``reads``: full names of the topics it wants to see."""

    writes: frozenset[str]
    reads: frozenset[str]

    def sending(self, record: Outgoing) -> Passage | None:
        """A record is about to be sent, perhaps not for the first time; none if it belongs to no trace."""
        ...

    def read(self, record: Record, context: Context) -> None:
        """A record that carries a context was read."""
        ...


class Teller:
    """Asks a story, as long as it does not fail."""

    def __init__(self, story: Story) -> None:
        self._story: Story | None = story

    def sending(self, record: Outgoing) -> tuple[Outgoing, Callable[[Stored], None] | None]:
        """The record as it shall be sent, and who is told when it was."""
        story = self._story
        if story is None or record.topic not in story.writes:
            return record, None
        try:
            passage = story.sending(record)
        except Exception:
            self._give_up()
            return record, None
        if passage is None:
            return record, None
        if passage.context is not None:
            record = record._replace(headers=(*record.headers, *passage.context.headers))
        return record, partial(self._tell, passage.stored)

    def _tell(self, stored: Callable[[Stored], None], what: Stored) -> None:
        try:
            stored(what)
        except Exception:
            self._give_up()

    def read(self, records: Sequence[Record]) -> None:
        """Records were read."""
        story = self._story
        if story is None or not records:
            return
        try:
            for record in records:
                if record.topic in story.reads and (context := context_of(record.headers)) is not None:
                    story.read(record, context)
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        log.exception("this process is not traced any more")
        self._story = None


@dataclass
class TracedBus(BusInterceptor):
    """``bus.port.Bus`` around another one."""

    teller: Teller

    def around_publisher(self, inner: Publisher) -> Publisher:
        """See ``BusInterceptor``."""
        return _Publisher(inner, self.teller)

    def around_transactional(self, inner: TransactionalPublisher) -> TransactionalPublisher:
        """See ``BusInterceptor``."""
        return _Transactional(inner, self.teller)

    def around_subscription(self, inner: Subscription) -> Subscription:
        """See ``BusInterceptor``."""
        return _Subscription(inner, self.teller)


@dataclass
class _Publisher(PublisherInterceptor):
    teller: Teller

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        record, tell = self.teller.sending(record)
        began_s = time.time()
        future = await self.inner.submit(record)
        if tell is not None:
            future.add_done_callback(partial(_tell_if_stored, tell, began_s))
        return future


def _tell_if_stored(tell: Callable[[Stored], None], began_s: float, done: "asyncio.Future[Position]") -> None:
    if not done.cancelled() and done.exception() is None:
        tell(Stored(*done.result(), began_s, time.time()))


@dataclass
class _Transactional(TransactionalInterceptor):
    teller: Teller

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        traced = [self.teller.sending(record) for record in records]
        began_s = time.time()
        await self.inner.commit([record for record, _ in traced], offsets=offsets, group_id=group_id)
        ended_s = time.time()
        for record, tell in traced:
            if tell is not None:
                tell(Stored(record.topic, record.partition, None, began_s, ended_s))


@dataclass
class _Subscription(SubscriptionInterceptor):
    teller: Teller

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        records = await self.inner.poll(max_records=max_records, timeout_s=timeout_s)
        self.teller.read(records)
        return records
