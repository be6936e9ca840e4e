"""Keeps the engine on the newest weights that a fetcher brings. Knows neither relays nor what the tensors mean.

Invariants:
- latest_wins: weights of a series are adopted in the order of (lineage, number), never an older version after a newer;
- no_completion_is_of_two_policies: those of another series, of which nobody is to have tokens beside these, are taken
  when nothing runs;
- a_fetched_version_is_not_held_back_by_newer_ones: if versions arrive faster than they can be fetched, the worker
  adopts the one it has. This holds for a worker that starts, and for one that waits until nothing runs.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from streamrl.bus.waiting import happens_within, in_thread
from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.identifiers import PolicyVersion, named_version
from streamrl.weights.fetch import WeightsFetcher

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Between attempts, doubled: an announcement may overtake its files by a moment, or a relay may be down for long."""
FIRST_TRIES = 3
"""How often a worker that begins fetches what has been announced while it fetched, before it takes what it has."""


class TakesWeights(Protocol):
    """An engine, as far as weights go."""

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """Take the weights in a directory between two decode steps.

        Raises:
            WeightsError: it cannot.
        """
        ...


class WeightsStatus(Protocol):
    """Where an adopter writes down what weights its engine has; a worker's status is one."""

    def set_weights(self, version: PolicyVersion, policy: str) -> None:
        """The engine has this version of a policy's weights; the served policy's name is empty."""
        ...

    def set_next_policy(self, policy: str) -> None:
        """The weights that are to be brought next are this policy's."""
        ...

    def await_idle(self, version: PolicyVersion | None) -> None:
        """This version waits until nothing runs; None: no version does any more."""
        ...


@dataclass
class WeightsAdopter:
    """``offer`` it announcements; those that a newer one overtakes before their turn are never fetched.

    ``held`` is the version in the engine, none before the first, and ``series`` the one that it is of, empty for
    the run's own. ``until_idle`` returns when the engine runs nothing: weights of another series are taken only then,
    and with ``only_idle`` all are. ``may_begin``: set but for the moments in which the engine, running nothing, takes
    them.
    """

    engine: TakesWeights
    fetcher: WeightsFetcher
    status: WeightsStatus
    until_idle: Callable[[], Awaitable[object]]
    only_idle: bool = False
    held: PolicyVersion | None = field(init=False, default=None)
    series: str = field(init=False, default="")
    may_begin: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _wanted: AnnouncedWeights | None = field(init=False, default=None)
    _offered: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_begin.set()

    def offer(self, ready: AnnouncedWeights) -> None:
        """Announce a version; older ones than the newest so far change nothing, the same one may name other relays.

        One of another series takes the place of whatever was announced before.
        """
        before = self._wanted
        if before is None or ready.series != before.series or ready.version > before.version:
            self._offered.set()
        elif ready.version < before.version:
            return
        self._wanted = ready
        self.status.set_next_policy(ready.series)

    async def adopt_loop(self) -> None:
        """Fetch and adopt whatever is newest.

        Consumes: announcements offered. Produces: weights in the engine.
        Waits for: an announcement newer than what is held; where it is to be, for the end of all that runs.
        On failure: the old weights stay in service; asks the next relay after a pause, for the newest version by then.
            Raises ``WeightsError`` if the engine refuses its very first weights.
        On stop: is cancelled; what was half fetched stays, and is fetched to its end if it is still wanted.
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
                # Before its first weights a worker gets no work, so it begins with those that are current by then.
                for _ in range(FIRST_TRIES):
                    if self._offered.is_set():
                        ready, directory = await self._fetch_newest()
            elif self._waits_for_idle(ready):
                ready, directory = await self._newest_when_idle(ready, directory)
                self.may_begin.clear()
            try:
                await self.engine.adopt(directory, ready.version)
            except WeightsError as error:
                if self.fetcher.takes_files_after(directory):
                    log.info("weights not sent, fetching files", reason=str(error), held=str(self.held))
                    self._offered.set()
                    continue
                # With older weights sampling goes on until the next version; without any there is nothing to do.
                if self.held is None:
                    raise
                log.error("weights refused by the engine", error=str(error), held=str(self.held))
                self.status.await_idle(None)  # of these it waits no more, and it wants orders again
            else:
                await self._hold(ready)
            finally:
                self.may_begin.set()

    def _waits_for_idle(self, ready: AnnouncedWeights) -> bool:
        return self.only_idle or ready.series != self.series

    async def _newest_when_idle(self, ready: AnnouncedWeights, directory: Path) -> tuple[AnnouncedWeights, Path]:
        """Wait until nothing runs; the newest version that is here by then. Newer ones are fetched meanwhile; one that
        need not wait, since it is of the series that is held after all, comes at once.
        """
        assert self.held is not None, "the first weights wait for nothing"
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
                except WeightsError:  # no relay had it yet, and the engine is waiting
                    self._offered.set()
                offered = asyncio.ensure_future(self._offered.wait())
                # Of those that a long tail lets pass by, no more than one lies on the disk.
                if ready.series == self.series:
                    await in_thread(self.fetcher.keep_only, {self.held, ready.version}, ready.series)
            # Orders that had been on their way when the dispatcher heard that none are wanted.
            await self.until_idle()
        finally:
            idle.cancel()
            offered.cancel()
        return ready, directory

    async def _fetch_newest(self, is_enough: Callable[[], bool] = lambda: False) -> tuple[AnnouncedWeights, Path]:
        """The newest version by the time that a relay delivers one, and its directory.

        Raises:
            WeightsError: none has, and it is enough.
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
                # Cleared before the fetch: an offer that comes while it runs must be looked at afterwards.
                self._offered.clear()
                ready = self._wanted
                assert ready is not None, "an offer was waited for"
                return ready, await self.fetcher.fetch(ready, attempt.retry_state.attempt_number - 1)
        raise AssertionError("retrying never ends")

    async def _wait_for_a_newer_one(self, pause_s: float) -> None:
        """Pause between two attempts: a newer version may be there at once when the older is gone for good."""
        await happens_within(self._offered, pause_s)

    def _log_failure(self, attempt: RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome is not None else None
        log.warning("weights not fetched", error=str(error), failures=attempt.attempt_number, held=str(self.held))

    async def _hold(self, ready: AnnouncedWeights) -> None:
        version, previous = ready.version, self.held if ready.series == self.series else None
        self.held, self.series = version, ready.series
        self.status.set_weights(version, ready.series)
        self.status.await_idle(None)
        log.info("weights adopted", version=named_version(ready.series or None, version))
        # In a thread: deleting gigabytes may take long, and the loop has tokens to hand on.
        await in_thread(self.fetcher.keep_only, {version, previous or version}, ready.series)
