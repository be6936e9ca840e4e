"""Delivers finished trajectories: re-sends under the same id until the broker has them, and says when it is behind."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import structlog

from bus.port import Outgoing, Position, Publisher
from schemas.errors import BusError, BusUnavailable, DeliveryUnknown, Superseded

# Keeps a worker that was replaced from publishing: every record of the worker passes here. Knows no topic. Invariant
# a_zombie_publishes_nothing: once superseded nothing is handed to the broker any more; and a process that stood still
# for longer than its lease hands over nothing before it has read control up to its present end.


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


log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MAX_REFUSALS = 5


@dataclass
class Outbox:
    """Holds at most what its callers hold: each waits for its own record. ``undelivered`` counts them."""

    publisher: Publisher
    max_undelivered: int
    undelivered: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the broker is so far behind that nothing new should be started."""
        return self.undelivered >= self.max_undelivered

    async def deliver(self, record: Outgoing) -> None:
        """Publish; while the outcome is unknown or no broker answers, again and again, however long that takes.

        Raises:
            BusError: the broker refused the record several times over.
        """
        self.undelivered += 1
        try:
            for attempt in count(1):
                if await self._is_delivered(record, attempt):
                    return
                await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S))
        finally:
            self.undelivered -= 1

    async def _is_delivered(self, record: Outgoing, attempt: int) -> bool:
        try:
            await self.publisher.publish(record)
        except (DeliveryUnknown, BusUnavailable) as error:
            if attempt.bit_count() == 1:
                log.warning(
                    "trajectory not confirmed, sending it again", key=record.key, attempt=attempt, error=str(error)
                )
            return False
        except BusError as error:
            if attempt >= MAX_REFUSALS:
                raise
            log.warning("trajectory refused, sending it again", key=record.key, attempt=attempt, error=str(error))
            return False
        return True
