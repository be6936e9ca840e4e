"""The runs that one dashboard shows: each with its state, and with what keeps it up to date.

Invariants, each with a test of its name:
- only_listed_runs_are_opened: a run in an address is looked up in the list of runs. No path is made of it;
- few_runs_are_open_at_once: a run is followed only after a reader has opened it, and at most ``MAX_OPEN`` runs are.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.bus.waiting import in_thread, wait_for_tasks
from streamrl.inspection.dashboard.ended import ended_state
from streamrl.inspection.dashboard.records import CLIENT_ID, PLAIN, DashboardContext
from streamrl.inspection.dashboard.updates import UpdateStream
from streamrl.inspection.diagnostics.connect import BrokerStopped, RunConnection, connect
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.opening import open_index
from streamrl.inspection.process import give_way_when
from streamrl.inspection.replay.show import Piece, pieces_of
from streamrl.inspection.source import RUNS, PastRun, own_broker
from streamrl.observability.record_index.following import FOLLOW_EVERY_S
from streamrl.observability.run_state.pace import OFTEN_S
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import StreamRLError, UserError
from streamrl.schemas.starts import read_starts
from streamrl.settings.run_directory import RunDirectory

MAX_OPEN = 8
"""Most runs of the list that are open at once: each keeps a state of some megabytes, and reads from a broker."""
LOOK_EVERY_S = 5.0
"""Seconds between two looks for a new start of a run: a new trainer takes longer to report."""


async def _nothing_to_follow(stop: asyncio.Event) -> None:
    await stop.wait()


@dataclass
class ShownRun:
    """A run on the page. ``context`` None: it has ended, its broker is stopped, and ``advice`` says what to do.

    ``follow``: keeps the state up to date, until it is cancelled or the run has to be opened again, because an ended
    one continues. ``requests``: number of requests that use the run now.
    """

    stream: UpdateStream
    context: DashboardContext | None
    advice: str = ""
    follow: Callable[[asyncio.Event], Coroutine[Any, Any, None]] = field(default=_nothing_to_follow)
    requests: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    following: asyncio.Task[None] | None = None

    @property
    def records(self) -> DashboardContext:
        """What answers questions about records.

        Raises:
            UserError: the run's broker is stopped.
        """
        if self.context is None:
            raise UserError(self.advice)
        return self.context

    @property
    def is_over(self) -> bool:
        """Whether the run is not followed any more: after an error, or because it has to be opened again."""
        return self.following is not None and self.following.done()

    def start(self) -> "ShownRun":
        """Follow the run from now on; returns the run itself."""
        self.following = asyncio.create_task(self.follow(self.stop))
        return self

    async def halt(self) -> None:
        """Stop following the run, which ends its update streams."""
        self.stop.set()
        if self.following is not None:
            self.following.cancel()
            await wait_for_tasks([self.following])

    async def close(self) -> None:
        """Stop following the run, and close its clients and its index. No request may use it any more."""
        await self.halt()
        if self.context is not None:
            await self.context.follower.history.close()
            self.context.index.close()


def ended_run(past: PastRun) -> ShownRun:
    """A run that has ended, from its files.

    Raises:
        DataError: a file of the run cannot be read.
    """
    advice = (
        f"run {past.name} has ended and its broker is stopped; to look at its records: {past.directory.broker_command}"
    )

    async def until_it_continues(stop: asyncio.Event) -> None:
        while own_broker(past.directory) is None:  # noqa: ASYNC110 - no event tells that a broker was started
            await asyncio.sleep(LOOK_EVERY_S)
        stop.set()

    return ShownRun(UpdateStream(ended_state(past)), None, advice, until_it_continues)


def living_run(connection: RunConnection, where: str, pace_s: Callable[[], float]) -> ShownRun:
    """A run that a broker has. ``where``: how a command line names it; empty: by its name."""
    state = connection.new_state()
    context = DashboardContext(
        connection.bus,
        state,
        where or connection.run,
        lambda: _pieces(connection),
        lambda: connection.bus.availability.explanation,
        open_index(connection.directory, connection.address, connection.run),
        connection.bus.for_single_records(),
    )
    # As rarely as all other work of this process next to a busy run.
    context.follower.every_s = lambda: FOLLOW_EVERY_S * pace_s()

    async def follow(stop: asyncio.Event) -> None:
        feed = await feed_of(connection, state, CLIENT_ID, pace_s)
        tasks = [
            asyncio.create_task(context.follower.run(stop)),
            asyncio.create_task(give_way_when(lambda: bool(feed.positions))),
            asyncio.create_task(_follow_starts(state, connection.directory)),
        ]
        try:
            await feed.run(stop)
        finally:
            for task in tasks:
                task.cancel()
            await wait_for_tasks(tasks)

    return ShownRun(UpdateStream(state, pace_s=pace_s), context, follow=follow)


async def opened(target: RunConnection | PastRun, where: str, pace_s: Callable[[], float]) -> ShownRun:
    """A run, not followed yet, from its broker or from its files.

    Raises:
        UserError: the run is not on the broker.
        BrokerError: no broker answers.
        DataError: a file of the run cannot be read.
    """
    if isinstance(target, PastRun):
        return await in_thread(ended_run, target)
    return living_run(await target.with_run(), where, pace_s)


def _pieces(connection: RunConnection) -> Piece:
    return PLAIN if connection.settings is None else pieces_of(connection.settings.model.path)


async def _follow_starts(state: RunState, directory: Path | None) -> None:
    """Keep the run's starts up to date until cancelled; nothing if its directory is not on this machine."""
    while directory is not None:
        state.processes.starts = await in_thread(read_starts, RunDirectory(directory).starts)
        await asyncio.sleep(LOOK_EVERY_S)


@dataclass
class ShownRuns:
    """The run that the command named, if any, and other runs in the same directory.

    ``listed``: lists the runs in ``root`` as `streamrl runs ls --json` does.
    """

    main: ShownRun | None
    root: Path
    listed: Callable[[Path], Sequence[Mapping[str, Any]]]
    pace_s: Callable[[], float] = lambda: OFTEN_S
    others: dict[str, ShownRun] = field(default_factory=dict)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def rows(self) -> list[dict[str, Any]]:
        """The runs in the directory, the newest first."""
        return [dict(row) for row in reversed(await in_thread(self.listed, self.root))]

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ShownRun]:
        """A run of the list, or with None the main one, which stays open during the block. It is opened if necessary.

        Raises:
            UserError: there is no such run, or too many are open.
        """
        shown = self.main if name is None else await self._named(name)
        if shown is None:
            raise UserError("expected a run, got none: the command named none; /runs/ lists all runs")
        shown.requests += 1
        try:
            yield shown
        finally:
            shown.requests -= 1

    async def _named(self, name: str) -> ShownRun:
        async with self._opening:
            if (known := self.others.get(name)) is not None and not known.is_over:
                return known
            # The name is compared with the list and never joined to a path: see only_listed_runs_are_opened.
            row = next((row for row in await self.rows() if row["name"] == name), None)
            if row is None:
                raise UserError(f"expected a run in {self.root}/, got none of this name; the list has them all")
            await self._make_room()
            self.others[name] = (await self._opened(Path(row["path"]))).start()
            return self.others[name]

    async def _opened(self, path: Path) -> ShownRun:
        target = await in_thread(find_target, path, None)
        assert target is not None, "a path names a run"
        return await opened(target, str(path), self.pace_s)

    async def follow_main(self, path: Path | None) -> None:
        """Follow the main run until cancelled, also if it has ended and continues. ``path``: its directory, if known.

        Raises:
            StreamRLError: it cannot be followed any more.
        """
        if self.main is None:
            await asyncio.Event().wait()
        while self.main is not None:
            following = self.main.start().following
            assert following is not None, "it was started"
            await following
            assert path is not None, "only a run whose directory is known has to be opened again"
            self.main = await self._reopened(path)

    async def _reopened(self, path: Path) -> ShownRun:
        while True:
            try:
                return await self._opened(path)
            except StreamRLError:  # its broker is still starting
                await asyncio.sleep(LOOK_EVERY_S)

    async def _make_room(self) -> None:
        if len(self.others) < MAX_OPEN:
            return
        unused = next((name for name, shown in self.others.items() if not shown.requests), None)
        if unused is None:
            raise UserError(f"expected at most {MAX_OPEN} runs of the list on open pages, got one more; close a page")
        await self.others.pop(unused).close()

    @property
    def _all(self) -> list[ShownRun]:
        return [*self.others.values(), *([] if self.main is None else [self.main])]

    async def halt(self) -> None:
        """Stop following all runs, so that their update streams end."""
        for shown in self._all:
            await shown.halt()

    async def close(self) -> None:
        """Close all runs; no request may use them any more."""
        for shown in self._all:
            await shown.close()


def find_target(run: Path | None, servers: str | None) -> RunConnection | PastRun | None:
    """What a page shows first: a run on its broker, an ended run, or None for the list of runs only.

    Raises:
        UserError: there is no such run, or neither a broker nor a list.
    """
    try:
        return connect(run, servers)
    except BrokerStopped as stopped:
        return stopped.past
    except UserError:
        if run is None and servers is None and any(RunDirectory(path).config.is_file() for path in RUNS.glob("*")):
            return None
        raise


def directory_of(target: RunConnection | PastRun | None) -> Path | None:
    """A run's directory; None if it is not on this machine, or there is no run."""
    if isinstance(target, PastRun):
        return target.directory.path
    return None if target is None else target.directory
