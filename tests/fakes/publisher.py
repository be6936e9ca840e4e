"""A bus whose publishers fail on demand; what is published successfully reaches the memory bus underneath."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from streamrl.bus.memory import MemoryBus, MemoryPublisher
from streamrl.bus.port import Outgoing, Position
from streamrl.schemas.errors import BusError, DeliveryUnknown


@dataclass
class FailingBus(MemoryBus):
    """``fail`` names the error for a record, or none; ``arrives``: whether a failed record is there all the same."""

    fail: Callable[[Outgoing], BusError | None] = lambda record: None
    arrives: Callable[[Outgoing], bool] = lambda record: False
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
        if error is None:
            return await super().submit(record)
        if isinstance(error, DeliveryUnknown) and self.bus.arrives(record):
            await super().submit(record)
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future
