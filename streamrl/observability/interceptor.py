"""The one interceptor between a role and its bus: observers are shown every record that the role sends and reads.

Metrics and tracing are two such observers. A record crosses one wrapper, however many of them look on; without any,
the role gets the bus itself. An observer may add headers to what is sent, and nothing else.

Invariant observing_never_fails: an observer that raises is logged once and asked no more; the record goes its way.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from streamrl.bus.port import (
    Bus,
    GroupMember,
    Outgoing,
    Position,
    Publisher,
    Record,
    Start,
    Subscription,
    TopicPartition,
    TransactionalPublisher,
)

log = structlog.get_logger()


class DeliveryReport(NamedTuple):
    """How the sending of a record, or of a transaction, ended.

    ``position``: of a single record that the broker has; a transaction does not learn its offsets. ``began_s`` is in
    seconds since the epoch, ``duration_s`` by a clock that is never set. ``error``: None if the broker has it all.
    """

    position: Position | None
    began_s: float
    duration_s: float
    error: BaseException | None

    @property
    def ended_s(self) -> float:
        """Seconds since the epoch."""
        return self.began_s + self.duration_s


class DeliveryObserver(Protocol):
    """Follows one record, or the records of one transaction, to the broker."""

    def accepted(self) -> None:
        """The publisher took the record and will go on by itself; the transaction was committed."""
        ...

    def settled(self, report: DeliveryReport) -> None:
        """The broker answered, or will not. A record that was cancelled is not settled."""
        ...


class BusObserver(Protocol):
    """What is shown all that passes between a role and its bus; called on the event loop, so it must not wait."""

    def sending(self, records: list[Outgoing]) -> DeliveryObserver | None:
        """One record, or a transaction, is about to be sent, perhaps not for the first time.

        May put others with more headers into their places in the list. None: the rest is of no interest.
        """
        ...

    def received(self, records: Sequence[Record]) -> None:
        """Records were read; never empty."""
        ...


def observed(bus: Bus, *observers: BusObserver) -> Bus:
    """The bus with these observers looking on; the bus itself if there are none."""
    return ObservedBus(bus, Observers(observers)) if observers else bus


class _Guard:
    """One observer, as long as it does not fail."""

    __slots__ = ("is_dropped", "observer")

    def __init__(self, observer: BusObserver) -> None:
        self.observer, self.is_dropped = observer, False

    # called within an except block: the log line takes the traceback from there
    def drop(self) -> None:
        self.is_dropped = True
        log.exception("an observer of the bus failed and is dropped", observer=type(self.observer).__name__)


class Observers:
    """Shows all of them what passes. This runs for every record, so the calls are guarded in place."""

    def __init__(self, observers: Iterable[BusObserver]) -> None:
        self._guards = [_Guard(observer) for observer in observers]

    def sending(self, records: list[Outgoing]) -> "_Delivery":
        """Show what is about to be sent; observers may change the list."""
        # one after the other on one list: a later observer sees the headers that an earlier one added
        following: list[tuple[_Guard, DeliveryObserver]] = []
        for guard in self._guards:
            if guard.is_dropped:
                continue
            try:
                delivery = guard.observer.sending(records)
            except Exception:  # whatever it is: the record matters more than who looks at it
                guard.drop()
            else:
                if delivery is not None:
                    following.append((guard, delivery))
        return _Delivery(following)

    def received(self, records: Sequence[Record]) -> None:
        """Show what was read."""
        if not records:  # an empty poll is the usual case of an idle role
            return
        for guard in self._guards:
            if guard.is_dropped:
                continue
            try:
                guard.observer.received(records)
            except Exception:
                guard.drop()


class _Delivery:
    """What one call sends, with those who follow it."""

    __slots__ = ("_began", "_began_s", "_following")

    def __init__(self, following: list[tuple[_Guard, DeliveryObserver]]) -> None:
        self._following = following
        # the first says when, for spans; the second how long, and is never set back
        self._began_s, self._began = time.time(), time.perf_counter()

    def accepted(self) -> None:
        for guard, delivery in self._following:
            # asked anew: it may have been dropped by another record since this one was on its way
            if guard.is_dropped:
                continue
            try:
                delivery.accepted()
            except Exception:
                guard.drop()

    def settled(self, position: Position | None, error: BaseException | None) -> None:
        report = DeliveryReport(position, self._began_s, time.perf_counter() - self._began, error)
        for guard, delivery in self._following:
            if guard.is_dropped:
                continue
            try:
                delivery.settled(report)
            except Exception:
                guard.drop()

    def settle_with(self, future: "asyncio.Future[Position]") -> None:
        # a callback on the future instead of a task that awaits it: this is done for every record
        if self._following:
            future.add_done_callback(self._done)

    def _done(self, future: "asyncio.Future[Position]") -> None:
        if not future.cancelled():  # ``exception`` of a cancelled future raises
            error = future.exception()
            self.settled(future.result() if error is None else None, error)


@dataclass(frozen=True)
class ObservedBus:
    """``bus.port.Bus`` that puts the interceptor around each client of the inner bus."""

    inner: Bus
    observers: Observers

    async def publisher(self, client_id: str) -> Publisher:
        """See the port."""
        return _ObservedPublisher(await self.inner.publisher(client_id), self.observers)

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        """See the port."""
        return _ObservedTransactions(await self.inner.transactional(transactional_id), self.observers)

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
        inner = await self.inner.subscribe(
            topics, client_id=client_id, start=start, partitions=partitions, group_id=group_id
        )
        return _ObservedSubscription(inner, self.observers)

    async def join(self, topic: str, *, group_id: str, client_id: str) -> GroupMember:
        """See the port; a member moves no record."""
        return await self.inner.join(topic, group_id=group_id, client_id=client_id)

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """See the port."""
        return await self.inner.group_offsets(topic, group_id=group_id)


@dataclass(frozen=True)
class _ObservedPublisher:
    inner: Publisher
    observers: Observers

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        records = [record]  # observers put a record with more headers into its place
        delivery = self.observers.sending(records)
        future = await self.inner.submit(records[0])
        # a future that is resolved already still calls back only at the loop's next turn: never before ``accepted``
        delivery.accepted()
        delivery.settle_with(future)
        return future

    async def publish(self, record: Outgoing) -> Position:
        return await (await self.submit(record))

    async def flush(self) -> None:
        await self.inner.flush()

    async def close(self) -> None:
        await self.inner.close()


@dataclass(frozen=True)
class _ObservedTransactions:
    inner: TransactionalPublisher
    observers: Observers

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        changed = list(records)  # a copy: the caller may send its own list again, without our headers
        delivery = self.observers.sending(changed)
        try:
            await self.inner.commit(changed, offsets=offsets, group_id=group_id)
        except Exception as error:  # not BaseException: what was cancelled is not settled
            delivery.settled(None, error)
            raise
        # readers see the records now, all of them, though nobody tells us their offsets
        delivery.accepted()
        delivery.settled(None, None)

    async def close(self) -> None:
        await self.inner.close()


@dataclass(frozen=True)
class _ObservedSubscription:
    inner: Subscription
    observers: Observers

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        records = await self.inner.poll(max_records=max_records, timeout_s=timeout_s)
        self.observers.received(records)
        return records

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self.inner.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self.inner.resume(partitions)

    def partitions(self) -> frozenset[TopicPartition]:
        return self.inner.partitions()

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        self.inner.seek(offsets)

    async def positions(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        return await self.inner.positions(partitions)

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        return await self.inner.end_offsets(partitions)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        return await self.inner.beginning_offsets(partitions)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        await self.inner.commit(offsets)

    async def close(self) -> None:
        await self.inner.close()
