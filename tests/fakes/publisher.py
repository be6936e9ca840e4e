"""A bus whose publishers fail or wait on demand; what they write reaches the memory bus underneath."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamrl.bus.memory import MemoryBus, MemoryPublisher
from streamrl.bus.port import Outgoing, Position
from streamrl.schemas.errors import BusError, DeliveryUnknown


@dataclass
class FailingBus(MemoryBus):
    """``fail`` names the error for a record, or none; ``arrives``: whether a failed record is there all the same.

    ``holds``: which records are acknowledged only once ``release`` is set. They are written then too, or, with
    ``writes_held``, at once.
    """

    fail: Callable[[Outgoing], BusError | None] = lambda record: None
    arrives: Callable[[Outgoing], bool] = lambda record: False
    holds: Callable[[Outgoing], bool] = lambda record: False
    writes_held: bool = False
    release: asyncio.Event = field(default_factory=asyncio.Event)
    attempts: list[Outgoing] = field(default_factory=list)

    async def publisher(self, client_id: str) -> "FailingPublisher":
        return FailingPublisher(self, client_id)


@dataclass
class FailingPublisher(MemoryPublisher):
    """Asks its bus what to do with each record."""

    bus: FailingBus

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        self.bus.attempts.append(record)
        error = self.bus.fail(record)
        if error is None and self.bus.holds(record):
            return asyncio.ensure_future(self._acknowledged(record))
        if error is None:
            return await super().submit(record)
        if isinstance(error, DeliveryUnknown) and self.bus.arrives(record):
            await self.write([record])
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    async def write(self, records: Sequence[Outgoing]) -> list[Position]:
        is_held = any(map(self.bus.holds, records))
        if is_held and not self.bus.writes_held:
            await self.bus.release.wait()
        positions = await super().write(records)
        if is_held:
            await self.bus.release.wait()
        return positions

    async def _acknowledged(self, record: Outgoing) -> Position:
        return (await self.write([record]))[0]
