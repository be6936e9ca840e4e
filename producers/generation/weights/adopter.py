"""Keeps the engine on the newest weights. Knows announcements and an engine, not where announcements come from.

Invariant latest_wins: weights are adopted in the order of (lineage, number), never an older version after a newer one.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from producers.generation.weights.fetcher import WeightsFetcher
from schemas.errors import WeightsError
from schemas.identifiers import PolicyVersion
from schemas.messages.control import WeightsReady
from schemas.ports.engine import Engine

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass
class Adopter:
    """``offer`` it announcements; those that a newer one overtakes before their turn are never fetched.

    ``held`` is the version in the engine, none before the first.
    """

    engine: Engine
    fetcher: WeightsFetcher
    on_adopted: Callable[[], None]
    held: PolicyVersion | None = None
    _wanted: WeightsReady | None = None
    _offered: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, ready: WeightsReady) -> None:
        """Announce a version; older ones than the newest so far change nothing."""
        if self._wanted is None or ready.version > self._wanted.version:
            self._wanted = ready
            self._offered.set()

    async def adopt_loop(self) -> None:
        """Fetch and adopt whatever is newest.

        Consumes: announcements offered. Produces: weights in the engine.
        Waits for: an announcement newer than what is held.
        On failure: the old weights stay in service; asks the next relay after a pause, for the newest version by then.
            Raises ``WeightsError`` if the engine refuses its very first weights.
        On stop: is cancelled; what was half fetched stays, and is fetched to its end if it is still wanted.
        """
        failures = 0
        while True:
            await self._offered.wait()
            self._offered.clear()
            ready = self._wanted
            assert ready is not None
            try:
                directory = await self.fetcher.fetch(ready, failures)
            except WeightsError as error:
                pause = min(FIRST_PAUSE_S * 2**failures, LONGEST_PAUSE_S)
                failures += 1
                log.warning("weights not fetched", error=str(error), failures=failures, held=str(self.held))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._offered.wait()
                self._offered.set()
                continue
            failures = 0
            try:
                await self.engine.adopt(directory, ready.version)
            except WeightsError as error:
                if self.held is None:
                    raise
                log.error("weights refused by the engine", error=str(error), held=str(self.held))
                continue
            await self._hold(ready.version)

    async def _hold(self, version: PolicyVersion) -> None:
        previous, self.held = self.held, version
        self.on_adopted()
        log.info("weights adopted", version=str(version))
        await asyncio.to_thread(self.fetcher.keep_only, {version, previous or version})
