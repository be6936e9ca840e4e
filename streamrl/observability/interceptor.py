"""The one interceptor between a role and its bus: observers see every record that the role sends and reads.

Metrics and tracing are two observers. A record crosses one wrapper, however many observers there are; without any, the
role gets the bus itself. An observer may add headers to sent records, and change nothing else.

Invariant observing_never_fails: an observer that raises is logged once and then dropped; the record is not affected.
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

    ``position``: of a single record that the broker has; None for a transaction, which does not learn its offsets.
    ``began_s``: seconds since the epoch. ``duration_s``: by a monotonic clock. ``error``: None if the broker has all.
    """

    position: Position | None
    began_s: float
    duration_s: float
    error: BaseException | None

    @property
    def ended_s(self) -> float:
        """When sending ended, in seconds since the epoch."""
        return self.began_s + self.duration_s


class DeliveryObserver(Protocol):
    """Follows one record, or the records of one transaction, to the broker."""

    def accepted(self) -> None:
        """Called when the publisher has taken the record and will send it, or when a transaction was committed."""
        ...

    def settled(self, report: DeliveryReport) -> None:
        """Called when the broker answered, or will not answer any more. Not called for a cancelled record."""
        ...


class BusObserver(Protocol):
    """Sees all records that pass between a role and its bus. Called on the event loop, so it must not wait."""

    def sending(self, records: list[Outgoing]) -> DeliveryObserver | None:
        """Called before one record, or a transaction, is sent, perhaps not for the first time.

        May replace records in the list by copies with more headers. Returns an observer of the delivery, or None.
        """
        ...

    def received(self, records: Sequence[Record]) -> None:
        """Called with the records of a read; never empty."""
        ...


def observed(bus: Bus, *observers: BusObserver) -> Bus:
    """The bus with these observers; the bus itself if there are none."""
    return ObservedBus(bus, Observers(observers)) if observers else bus


class _Guard:
    """One observer, which is dropped when it fails."""

    __slots__ = ("is_dropped", "observer")

    def __init__(self, observer: BusObserver) -> None:
        self.observer, self.is_dropped = observer, False

    # called within an except block: the log line takes the traceback from there
    def drop(self) -> None:
        self.is_dropped = True
        log.exception("an observer of the bus failed and is dropped", observer=type(self.observer).__name__)


class Observers:
    """Shows records to all observers. This runs for every record, so the calls are guarded in place."""

    def __init__(self, observers: Iterable[BusObserver]) -> None:
        self._guards = [_Guard(observer) for observer in observers]

    def sending(self, records: list[Outgoing]) -> "_Delivery":
        """Show records that are about to be sent; observers may change the list."""
        # one after the other on one list: a later observer sees the headers that an earlier one added
        following: list[tuple[_Guard, DeliveryObserver]] = []
        for guard in self._guards:
            if guard.is_dropped:
                continue
            try:
                delivery = guard.observer.sending(records)
            except Exception:  # any error: the record matters more than its observer
                guard.drop()
            else:
                if delivery is not None:
                    following.append((guard, delivery))
        return _Delivery(following)

    def received(self, records: Sequence[Record]) -> None:
        """Show records that were read."""
        if not records:  # an empty poll is the usual case for an idle role
            return
        for guard in self._guards:
            if guard.is_dropped:
                continue
            try:
                guard.observer.received(records)
            except Exception:
                guard.drop()


class _Delivery:
    """The records of one call, with the observers that follow their delivery."""

    __slots__ = ("_following", "_started_at_s", "_timer_start")

    def __init__(self, following: list[tuple[_Guard, DeliveryObserver]]) -> None:
        self._following = following
        # the first is the time of day, for spans; the second measures durations and is never set back
        self._started_at_s, self._timer_start = time.time(), time.perf_counter()

    def accepted(self) -> None:
        for guard, delivery in self._following:
            # checked again: while this record was on its way, another one may have made the observer fail
            if guard.is_dropped:
                continue
            try:
                delivery.accepted()
            except Exception:
                guard.drop()

    def settled(self, position: Position | None, error: BaseException | None) -> None:
        report = DeliveryReport(position, self._started_at_s, time.perf_counter() - self._timer_start, error)
        for guard, delivery in self._following:
            if guard.is_dropped:
                continue
            try:
                delivery.settled(report)
            except Exception:
                guard.drop()

    def settle_with(self, future: "asyncio.Future[Position]") -> None:
        # a callback on the future instead of a task that awaits it, since this runs for every record
        if self._following:
            future.add_done_callback(self._done)

    def _done(self, future: "asyncio.Future[Position]") -> None:
        if not future.cancelled():  # ``exception`` of a cancelled future raises
            error = future.exception()
            self.settled(future.result() if error is None else None, error)


@dataclass(frozen=True)
class ObservedBus:
    """A ``bus.port.Bus`` that puts the interceptor around each client of the inner bus."""

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
        """See the port; not observed, since a member reads and sends no records."""
        return await self.inner.join(topic, group_id=group_id, client_id=client_id)

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """See the port."""
        return await self.inner.group_offsets(topic, group_id=group_id)


@dataclass(frozen=True)
class _ObservedPublisher:
    inner: Publisher
    observers: Observers

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        records = [record]  # observers may replace it by a copy with more headers
        delivery = self.observers.sending(records)
        future = await self.inner.submit(records[0])
        # even a resolved future calls back only at the loop's next turn, so never before ``accepted``
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
        except Exception as error:  # not BaseException: a cancelled transaction is not settled
            delivery.settled(None, error)
            raise
        # readers see all the records now; their offsets are not known here
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
