"""Announcements under way while the trainer goes on gathering: at most one, so that their order never changes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from consumers.training.announcing.announcer import Announcer, Offsets
from schemas.ports.bus import Outgoing

log = structlog.get_logger()


@dataclass
class Announcements:
    """``done`` is called after each one."""

    announcer: Announcer
    done: Callable[[], None]
    under_way: "asyncio.Task[None] | None" = None

    async def post(self, records: Sequence[Outgoing], offsets: Offsets) -> None:
        """Announce once the one before is settled; returns while this one is under way.

        Raises:
            Superseded: see ``Announcer``, for the one before.
            BusError: see ``Announcer``, for the one before.
        """
        await self.settled()
        self.under_way = asyncio.create_task(self._announce(records, offsets))

    async def _announce(self, records: Sequence[Outgoing], offsets: Offsets) -> None:
        await self.announcer.announce(records, offsets)
        self.done()

    async def settled(self) -> None:
        """Wait for the one under way.

        Raises:
            Superseded: see ``Announcer``.
            BusError: see ``Announcer``.
        """
        if self.under_way is not None:
            await asyncio.wait({self.under_way})
            finished, self.under_way = self.under_way, None
            finished.result()

    async def close(self) -> None:
        """Give up the one under way, if any, and release."""
        if (left := self.under_way) is not None:
            left.cancel()
            await asyncio.wait({left})
            self.under_way = None
            if not left.cancelled() and (error := left.exception()) is not None:
                log.error("announcement failed", error=str(error))
        await self.announcer.close()
