"""Keeps a worker that was replaced from publishing: every record of the worker passes here. Knows no topic.

Invariant a_zombie_publishes_nothing: once superseded nothing is handed to the broker any more; and a process that
stood still for longer than its lease hands over nothing before it has read control up to its present end.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.errors import Superseded
from schemas.ports.bus import Outgoing, Position, Publisher


@dataclass
class Fence:
    """``looked`` says that control was read to its end; ``claimed`` what a claim of our id means.

    Of two incarnations the coordinator names the newest by first heartbeat. A claim of another one that comes before
    our own may have been overtaken by our first heartbeat; one after it, or one that is repeated, ends us.
    """

    worker_id: str
    incarnation: str
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    superseded: Superseded | None = None
    _looked_at: float = field(init=False)
    _looked: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._looked_at = self.clock()

    @property
    def stood_still(self) -> bool:
        """Whether nobody looked at control for longer than the lease."""
        return self.clock() - self._looked_at > self.lease_s

    def looked(self) -> None:
        """Control was just read to its end."""
        self._looked_at = self.clock()
        self._looked.set()

    def claimed(self, incarnation: str) -> None:
        """The coordinator says which incarnation holds our id.

        Raises:
            Superseded: not this one.
        """
        if incarnation != self.incarnation and self._heard & {self.incarnation, incarnation}:
            self.superseded = Superseded(
                f"worker {self.worker_id} ({self.incarnation}) was superseded by incarnation {incarnation}: another "
                "process has the same id; if both are wanted, give each an id of its own with --id"
            )
            self._looked.set()
            raise self.superseded
        self._heard.add(incarnation)

    async def wait_until_passed(self) -> None:
        """Return when it is known that we are not superseded.

        Raises:
            Superseded: we are.
        """
        while self.superseded is None and self.stood_still:
            self._looked.clear()
            await self._looked.wait()
        if self.superseded is not None:
            raise self.superseded


@dataclass(frozen=True)
class FencedPublisher:
    """A publisher behind the fence; its methods raise ``Superseded`` once the worker is."""

    publisher: Publisher
    fence: Fence

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """See the port."""
        await self.fence.wait_until_passed()
        return await self.publisher.submit(record)

    async def publish(self, record: Outgoing) -> Position:
        """See the port."""
        await self.fence.wait_until_passed()
        return await self.publisher.publish(record)

    async def flush(self) -> None:
        """See the port."""
        await self.publisher.flush()

    async def close(self) -> None:
        """See the port."""
        await self.publisher.close()
