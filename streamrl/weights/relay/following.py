"""Has a relay hold what is announced of one policy: the newest version, to its end before a newer one begins."""

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
"""Between attempts while nobody has a version, or the disk is full."""


@dataclass
class CopyFollower:
    """``hear`` it announcements. ``on_whole``: told when a version is here whole."""

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
        """Take an announcement into account; the same version again names other relays."""
        if self._wanted is None or ready.version >= self._wanted.version:
            self._wanted = ready
            self._announced.set()

    def forget(self) -> None:
        """What was announced was another run's."""
        self._wanted = None

    async def fetch_loop(self) -> None:
        """One version at a time, to its end, and then the newest: over a slow link none would ever be whole if each
        newer one began in its place.

        Consumes: announcements heard. Produces: copies.
        Waits for: an announcement; an upstream that has it.
        On failure: asks again after a pause. On stop: is cancelled; a half of a version stays and is gone on with.
        """
        while True:
            await self._announced.wait()
            self._announced.clear()
            ready = self._wanted
            if ready is None or self._holds(ready):
                continue
            began, named = self.clock(), named_version(ready.series or None, ready.version)
            try:
                await self.transfer.fetch(ready)
            except (WeightsError, OSError) as error:
                log.warning("weights not fetched", version=named, error=str(error))
                self._announced.set()
                await asyncio.sleep(PAUSE_S)
            else:
                log.info("weights at hand", version=named, seconds=round(self.clock() - began, 3))
                self.on_whole()

    def _holds(self, ready: AnnouncedWeights) -> bool:
        """Whether nothing is to be fetched: it is there, or what is there is newer."""
        newest: PolicyVersion | None = max(self.copies.whole(), default=None)
        if newest is None or newest < ready.version:
            return False
        return newest > ready.version or self.copies.versions[newest].is_as_announced(ready.manifest_sha256)

    def _is_overtaken(self, ready: AnnouncedWeights) -> bool:
        """Whether another one is wanted now: a newer one, or another run's, whose numbers begin anew."""
        wanted = self._wanted
        return wanted is None or (wanted.version, wanted.manifest_sha256) != (ready.version, ready.manifest_sha256)
