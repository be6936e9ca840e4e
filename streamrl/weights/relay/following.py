"""Keeps a relay's copies of one policy up to date. It finishes each fetch before it starts one of a newer version."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.identifiers import PolicyVersion, named_version
from streamrl.weights.relay.copies import RelayCopies
from streamrl.weights.relay.transfer import ChainTransfer, Route

log = structlog.get_logger()

PAUSE_S = 1.0
"""Seconds between attempts while no relay has a version, or the disk is full."""


@dataclass
class CopyFollower:
    """Fetches the announced versions that ``hear`` gets. ``on_whole`` is called when a whole version is here."""

    copies: RelayCopies
    route: Route
    timeout_s: float
    on_whole: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    transfer: ChainTransfer = field(init=False)
    _wanted: AnnouncedWeights | None = None
    _announced: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.transfer = ChainTransfer(self.copies, self.route, self.timeout_s, self._is_overtaken)

    def hear(self, ready: AnnouncedWeights) -> None:
        """Take an announcement into account. A repeated one may name other relays."""
        if self._wanted is None or ready.version >= self._wanted.version:
            self._wanted = ready
            self._announced.set()

    def forget(self) -> None:
        """Forget the announcement: it was another run's."""
        self._wanted = None

    async def fetch_loop(self) -> None:
        """Fetch one version to its end, then the newest. If newer ones interrupted it, a slow link would finish none.

        Consumes: announcements heard. Produces: copies.
        Waits for: an announcement; an upstream that has it.
        On failure: asks again after a pause. On stop: is cancelled; the next start continues a half-fetched version.
        """
        while True:
            await self._announced.wait()
            self._announced.clear()
            ready = self._wanted
            if ready is None or self._holds(ready):
                continue
            started_at, named = self.clock(), named_version(ready.series or None, ready.version)
            try:
                await self.transfer.fetch(ready)
            except (WeightsError, OSError) as error:
                log.warning("weights not fetched", version=named, error=str(error))
                self._announced.set()
                await asyncio.sleep(PAUSE_S)
            else:
                log.info("weights at hand", version=named, seconds=round(self.clock() - started_at, 3))
                self.on_whole()

    def _holds(self, ready: AnnouncedWeights) -> bool:
        """Whether there is nothing to fetch: the announced version, or a newer one, is here."""
        newest: PolicyVersion | None = max(self.copies.whole(), default=None)
        if newest is None or newest < ready.version:
            return False
        return newest > ready.version or self.copies.versions[newest].is_as_announced(ready.manifest_sha256)

    def _is_overtaken(self, ready: AnnouncedWeights) -> bool:
        """Whether another version is wanted now: a newer one, or another run's, whose numbers start again."""
        wanted = self._wanted
        return wanted is None or (wanted.version, wanted.manifest_sha256) != (ready.version, ready.manifest_sha256)
