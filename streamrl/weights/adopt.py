"""Keeps the engine on the newest weights that the fetcher brings. Knows neither relays nor what the tensors mean.

Invariants:
- latest_version_wins: a series' weights are adopted in the order of (lineage, number), never an older version after a
  newer one;
- no_completion_mixes_two_policies: the worker adopts weights of another series only when no completion is running;
- newer_versions_do_not_delay_a_fetched_one: if versions arrive faster than they can be fetched, the worker adopts the
  version that it has. This also holds while a worker starts, and while it waits until no completion is running.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from streamrl.bus.waiting import in_thread, wait_for_event
from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.identifiers import PolicyVersion, named_version
from streamrl.weights.fetch import WeightsFetcher

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Seconds between attempts, doubled each time: files may follow their announcement by a moment, or a relay may be down
for long.
"""
FIRST_TRIES = 3
"""How often a starting worker fetches a version announced during its last fetch, before it adopts the one it has."""


class TakesWeights(Protocol):
    """The part of an engine that takes weights."""

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """Take the weights in a directory between two decode steps.

        Raises:
            WeightsError: the engine cannot take them.
        """
        ...


class WeightsStatus(Protocol):
    """Where an adopter records which weights its engine has, such as a worker's status."""

    def set_weights(self, version: PolicyVersion, policy: str) -> None:
        """Record that the engine has this version of a policy's weights. The served policy's name is empty."""
        ...

    def set_next_policy(self, policy: str) -> None:
        """Record that the next weights are this policy's."""
        ...

    def await_idle(self, version: PolicyVersion | None) -> None:
        """Record that this version waits until no completion is running; None: no version waits."""
        ...


@dataclass
class WeightsAdopter:
    """Adopts the newest of the announcements that ``offer`` gets. Versions overtaken by a newer one are not fetched.

    ``held``: the version in the engine; None before the first. ``series``: that version's series; empty for the run's
    own. ``until_idle`` returns when no completion is running; only then does the engine take weights of another series.
    With ``only_idle`` it takes all weights only then. ``completions_may_start`` is cleared while an idle engine takes
    weights, and set at all other times.
    """

    engine: TakesWeights
    fetcher: WeightsFetcher
    status: WeightsStatus
    until_idle: Callable[[], Awaitable[object]]
    only_idle: bool = False
    held: PolicyVersion | None = field(init=False, default=None)
    series: str = field(init=False, default="")
    completions_may_start: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _wanted: AnnouncedWeights | None = field(init=False, default=None)
    _offered: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.completions_may_start.set()

    def offer(self, ready: AnnouncedWeights) -> None:
        """Take an announcement. One older than the newest so far is ignored; a repeated one may name other relays.

        An announcement of another series replaces the one before it.
        """
        before = self._wanted
        if before is None or ready.series != before.series or ready.version > before.version:
            self._offered.set()
        elif ready.version < before.version:
            return
        self._wanted = ready
        self.status.set_next_policy(ready.series)

    async def adopt_loop(self) -> None:
        """Fetch and adopt the newest version, again and again.

        Consumes: announcements offered. Produces: weights in the engine.
        Waits for: an announcement newer than the held version; before some weights, the end of running completions.
        On failure: the old weights stay in service; asks the next relay after a pause, for the newest version by then.
            Raises ``WeightsError`` if the engine refuses its very first weights.
        On stop: is cancelled; a half-fetched version stays, and a later fetch continues it if it is still wanted.
        """
        try:
            await self._adopt_all()
        finally:
            self.fetcher.release()

    async def _adopt_all(self) -> None:
        while True:
            await self._offered.wait()
            ready, directory = await self._fetch_newest()
            if self.held is None:
                # A worker gets no work before its first weights, so it can afford to fetch the current ones.
                for _ in range(FIRST_TRIES):
                    if self._offered.is_set():
                        ready, directory = await self._fetch_newest()
            elif self._waits_for_idle(ready):
                ready, directory = await self._newest_when_idle(ready, directory)
                self.completions_may_start.clear()
            try:
                await self.engine.adopt(directory, ready.version)
            except WeightsError as error:
                if self.fetcher.falls_back_to_files(directory):
                    log.info("weights not sent, fetching files", reason=str(error), held=str(self.held))
                    self._offered.set()
                    continue
                # With older weights the worker samples on until the next version; without any it cannot work.
                if self.held is None:
                    raise
                log.error("weights refused by the engine", error=str(error), held=str(self.held))
                self.status.await_idle(None)  # the refused version no longer waits: the worker wants orders again
            else:
                await self._hold(ready)
            finally:
                self.completions_may_start.set()

    def _waits_for_idle(self, ready: AnnouncedWeights) -> bool:
        return self.only_idle or ready.series != self.series

    async def _newest_when_idle(self, ready: AnnouncedWeights, directory: Path) -> tuple[AnnouncedWeights, Path]:
        """Wait until no completion is running, and fetch newer versions in the meantime; the newest one fetched.

        Returns at once with a version that need not wait, because it is of the held series after all.
        """
        assert self.held is not None, "the first weights never wait for an idle engine"
        idle, offered = asyncio.ensure_future(self.until_idle()), asyncio.ensure_future(self._offered.wait())
        try:
            while not idle.done():
                if not self._waits_for_idle(ready):
                    return ready, directory
                self.status.await_idle(ready.version)
                await asyncio.wait({idle, offered}, return_when=asyncio.FIRST_COMPLETED)
                if idle.done():
                    break
                try:
                    ready, directory = await self._fetch_newest(idle.done)
                except WeightsError:  # no relay had it yet, and the engine is idle by now
                    self._offered.set()
                offered = asyncio.ensure_future(self._offered.wait())
                # During a long tail many versions may pass by: keep only the newest of them on the disk.
                if ready.series == self.series:
                    await in_thread(self.fetcher.keep_only, {self.held, ready.version}, ready.series)
            # Orders may still arrive that were under way when the dispatcher learned that the worker wants none.
            await self.until_idle()
        finally:
            idle.cancel()
            offered.cancel()
        return ready, directory

    async def _fetch_newest(self, is_enough: Callable[[], bool] = lambda: False) -> tuple[AnnouncedWeights, Path]:
        """The newest version, once a relay has delivered it, and its directory.

        Raises:
            WeightsError: a fetch failed and ``is_enough`` is true.
        """
        async for attempt in AsyncRetrying(
            sleep=self._wait_for_a_newer_one,
            stop=lambda _: is_enough(),
            reraise=True,
            retry=retry_if_exception_type(WeightsError),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=self._log_failure,
        ):
            with attempt:
                # Cleared before the fetch: an offer that comes during the fetch must be looked at afterwards.
                self._offered.clear()
                ready = self._wanted
                assert ready is not None, "an announcement was offered before"
                return ready, await self.fetcher.fetch(ready, attempt.retry_state.attempt_number - 1)
        raise AssertionError("retrying never ends")

    async def _wait_for_a_newer_one(self, pause_s: float) -> None:
        """Pause between two attempts, but no longer than until a newer version: the older may be gone for good."""
        await wait_for_event(self._offered, pause_s)

    def _log_failure(self, attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome is not None else None
        log.warning("weights not fetched", error=str(error), failures=attempt.attempt_number, held=str(self.held))

    async def _hold(self, ready: AnnouncedWeights) -> None:
        version, previous = ready.version, self.held if ready.series == self.series else None
        self.held, self.series = version, ready.series
        self.status.set_weights(version, ready.series)
        self.status.await_idle(None)
        log.info("weights adopted", version=named_version(ready.series or None, version))
        # In a thread: deleting gigabytes may take long, and the event loop has tokens to pass on.
        await in_thread(self.fetcher.keep_only, {version, previous or version}, ready.series)
