"""A bus in memory whose subscriptions give little at a time."""

from dataclasses import dataclass
from typing import Any

from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.bus.port import Record


@dataclass
class PacedBus(MemoryBus):
    """A subscription gives at most ``max_records`` at once, and waits for the first one at most ``wait_s``."""

    max_records: int = 500
    wait_s: float = 1.0

    async def subscribe(self, *args: Any, **options: Any) -> "PacedSubscription":
        found = await super().subscribe(*args, **options)
        return PacedSubscription(self, found.offsets, found.group_id)


@dataclass
class PacedSubscription(MemorySubscription):
    bus: PacedBus

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        most, wait_s = min(max_records, self.bus.max_records), min(timeout_s, self.bus.wait_s)
        return await super().poll(max_records=most, timeout_s=wait_s)
