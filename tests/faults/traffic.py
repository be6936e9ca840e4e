"""Numbered records written and read until all is settled, as workers do: what is unknown is sent again."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from streamrl.bus.port import Bus, Outgoing, Publisher, Record, Subscription
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown
from tests.progress import patience


@dataclass
class Traffic:
    """Writes records 0, 1, 2 … of ``size`` bytes to partition 0, one after another; reads what arrives."""

    bus: Bus
    topic: str
    size: int = 64
    pause_s: float = 0.01
    written: list[int] = field(default_factory=list)
    sent_again: set[int] = field(default_factory=set)
    read: list[int] = field(default_factory=list)
    last_read_at: float = 0.0
    last_written_at: float = 0.0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _opened: list[Publisher | Subscription] = field(default_factory=list)
    _stopping: bool = False

    async def start(self) -> None:
        """Open both ends and begin."""
        publisher = await self.bus.publisher("writer")
        subscription = await self.bus.subscribe([self.topic], client_id="reader", partitions=[0])
        self._opened += [publisher, subscription]
        self._tasks += [
            asyncio.create_task(self._write_until_stopped(publisher)),
            asyncio.create_task(self._read_until_stopped(subscription)),
        ]

    async def flowing_after(self, since: float, timeout_s: float) -> float:
        """Seconds from ``since`` until a record written after it was read; loop times."""
        async with patience(timeout_s):
            while self.last_written_at <= since:
                await asyncio.sleep(0.02)
            mark = self.written[-1]
            while mark not in self.read:
                await asyncio.sleep(0.02)
        return asyncio.get_running_loop().time() - since

    async def finish(self, timeout_s: float = 60.0) -> None:
        """Stop writing, wait until everything acknowledged was read, and release."""
        self._stopping = True
        async with patience(timeout_s):
            await self._tasks[0]
            while not set(self.written) <= set(self.read):
                await asyncio.sleep(0.02)
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for opened in self._opened:
            await opened.close()

    async def _write_until_stopped(self, publisher: Publisher) -> None:
        number = 0
        while not self._stopping:
            await self._write(publisher, number)
            number += 1
            await asyncio.sleep(self.pause_s)

    async def _write(self, publisher: Publisher, number: int) -> None:
        value = b"%d " % number + bytes(max(0, self.size - 10))
        while True:
            try:
                await publisher.publish(Outgoing(self.topic, value, None, 0))
            except (DeliveryUnknown, BusUnavailable):
                self.sent_again.add(number)
                await asyncio.sleep(0.1)
            else:
                self.written.append(number)
                self.last_written_at = asyncio.get_running_loop().time()
                return

    async def _read_until_stopped(self, subscription: Subscription) -> None:
        while True:
            records: list[Record] = []
            with contextlib.suppress(BusUnavailable):
                records = await subscription.poll(timeout_s=0.2)
            if records:
                self.read += [int((record.value or b"").split(b" ")[0]) for record in records]
                self.last_read_at = asyncio.get_running_loop().time()


def check(traffic: Traffic) -> None:
    """Nothing lost; nothing twice but what was sent again; first arrivals in order."""
    first_arrivals = list(dict.fromkeys(traffic.read))
    assert sorted(first_arrivals) == first_arrivals, "out of order"
    assert set(traffic.written) <= set(traffic.read), "lost"
    twice = {number for number in first_arrivals if traffic.read.count(number) > 1}
    assert twice <= traffic.sent_again, "twice without having been sent again"
