"""Delivers finished trajectories: re-sends under the same id until the broker has them, and says when it is behind."""

import asyncio
from dataclasses import dataclass
from itertools import count

import structlog

from schemas.errors import BusError, BusUnavailable, DeliveryUnknown
from schemas.ports.bus import Outgoing, Publisher

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
