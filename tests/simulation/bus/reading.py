"""A subscription on the simulated bus: in order per partition, committed records only, sometimes slow, never wrong."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamrl.bus.port import Record, TopicPartition
from streamrl.schemas.errors import BusError, DataLossRefused
from tests.simulation.bus.network import leader_of

if TYPE_CHECKING:
    from tests.simulation.bus.sim_bus import SimBus


@dataclass(eq=False)
class SimSubscription:
    """``bus.port.Subscription``."""

    bus: "SimBus"
    name: str
    offsets: dict[TopicPartition, int]
    group_id: str | None
    paused: set[TopicPartition] = field(default_factory=set)
    closed: bool = False
    turn: int = 0
    role: str | None = None

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records; waits for the first one at most ``timeout_s``."""
        self._check_open()
        loop, chances = asyncio.get_running_loop(), self.bus.chances
        deadline = loop.time() + timeout_s
        if not self.bus.is_perfect and timeout_s > 0:
            if chances.happens(chances.rates.empty_poll):
                await asyncio.sleep(timeout_s)
                return []
            slow = chances.happens(chances.rates.slow_poll)
            await asyncio.sleep(10 * chances.latency() if slow else 0)
        else:
            await asyncio.sleep(0)  # so that a caller that asks without waiting lets others write
        while True:
            self._check_open()
            if records := self._take(max_records):
                self.bus.events.polled(self.name, records)
                return records
            if loop.time() >= deadline:
                return []
            await self._something_arrives(deadline)

    async def _something_arrives(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        logs = [self.bus.broker.log(tp) for tp in self.offsets if tp not in self.paused]
        for log in logs:
            log.waiting[arrived] = None
        timer = loop.call_at(deadline, _set, arrived)
        try:
            await arrived
        finally:
            timer.cancel()
            for log in logs:
                del log.waiting[arrived]

    def _take(self, most: int) -> list[Record]:
        batch: list[Record] = []
        if not self.bus.broker.is_up:
            return batch
        partitions = [tp for tp in self.offsets if tp not in self.paused]
        if partitions and not self.bus.is_perfect:
            self.turn = (self.turn + 1) % len(partitions)
            partitions = partitions[self.turn :] + partitions[: self.turn]
        for tp in partitions:
            if not self.bus.network.reaches_leader(self.role, tp):
                continue
            log = self.bus.broker.log(tp)
            offset = self.offsets[tp]
            if offset < log.first:
                raise lost(tp, offset, log.first)
            if offset < len(log.slots) and len(batch) < most:
                records, self.offsets[tp] = log.read(offset, most - len(batch))
                batch += records
        return batch

    def _check_open(self) -> None:
        self.bus.check_caller()
        if self.closed:
            raise BusError("the subscription is closed; open a new one")

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
        """Deliver from these offsets next; the others stay where they are."""
        self.offsets |= offsets

    async def positions(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The next offset that ``poll`` will deliver, by partition."""
        self._check_open()
        return {tp: self.offsets[tp] for tp in self._asked(partitions)}

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The offset after the last record that may be read, by partition."""
        await self._answered("end offsets")
        return {tp: self.bus.broker.log(tp).stable for tp in self._asked(partitions)}

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The oldest offset held, by partition."""
        await self._answered("beginning offsets")
        return {tp: self.bus.broker.log(tp).first for tp in self._asked(partitions)}

    def _asked(self, partitions: Iterable[TopicPartition] | None) -> list[TopicPartition]:
        wanted = set(self.offsets if partitions is None else partitions)
        return [tp for tp in self.offsets if tp in wanted]

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Remember the offsets under the group's name."""
        assert self.group_id is not None, "commit needs a subscription with a group_id"
        await self._answered("a commit")
        self.bus.broker.committed.update({(self.group_id, tp): offset for tp, offset in offsets.items()})

    async def _answered(self, what: str) -> None:
        self._check_open()
        # Each leader has to answer for its own partitions.
        nodes = {leader_of(tp) for tp in self.offsets} if self.bus.network.cuts else set[int]()
        asked: list[int | None] = [*sorted(nodes)]
        for node in asked or [None]:
            await self.bus.connected(what, node)
        self._check_open()

    async def close(self) -> None:
        """Refuse further reading."""
        self.closed = True


def lost(tp: TopicPartition, offset: int, first: int) -> DataLossRefused:
    """Retention deleted what was to be read next."""
    return DataLossRefused(
        f"expected offset {offset} of {tp.topic}/{tp.partition}, the broker holds records from {first} on",
        [(tp.topic, tp.partition, offset, first)],
    )


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
