"""A dashboard served over a made-up run, with a past and, if wanted, a present that goes on."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.inspection.dashboard.records import DashboardContext
from streamrl.inspection.dashboard.server import bind, build_app
from streamrl.inspection.dashboard.shown import ShownRun, ShownRuns
from streamrl.inspection.dashboard.updates import UpdateStream
from streamrl.observability.run_state.feed import RunFeed
from streamrl.observability.run_state.parts import RunPart
from streamrl.observability.run_state.state import RunState
from tests.observability.run_state.made_up_run import SHARDS, VOCABULARY, Happening, MadeUpRun
from tests.observability.run_state.writing import append, append_letters, append_raw, topics_of

RUN = "gsm8k-grpo"
Listed = Callable[[Path], Sequence[Mapping[str, Any]]]


def nothing(_root: Path) -> Sequence[Mapping[str, Any]]:
    """A directory without runs."""
    return ()


@dataclass
class Served:
    """``address`` ends with a slash."""

    address: str
    bus: MemoryBus
    state: RunState
    context: DashboardContext


@asynccontextmanager
async def served(
    past_s: float = 60.0,
    more: Iterable[Happening] = (),
    *,
    parts: tuple[RunPart, ...] = (),
    root: Path = Path("nowhere"),
    listed: Listed = nothing,
    goes_on: bool = True,
) -> AsyncIterator[Served]:
    """A quiet run that goes on, until the end of the block. ``more``: what else happened in its past."""
    bus, now = topics_of(RUN), time.time()
    happenings = MadeUpRun(now - past_s).happenings()
    for happening in happenings:
        append(bus, RUN, happening)
        if happening.at > now:
            break
    append_letters(bus, RUN, now)
    for happening in more:
        append(bus, RUN, happening)
    coming = ((each.at, partial(append, bus, RUN, each)) for each in happenings) if goes_on else iter(())
    async with _served(bus, coming, RunState(RUN, parts=parts), root, listed) as dashboard:
        yield dashboard


@asynccontextmanager
async def served_fast(seconds: float) -> AsyncIterator[Served]:
    """A run of a thousand trajectories a second for so long; made up beforehand, so that only reading it takes time."""
    bus, begin = topics_of(RUN), time.time() + 1.0 + seconds / 2
    fast = MadeUpRun(begin, workers=16, slots=32, speed=7.0, per_step=512, train_s=0.3).happenings()
    made = []
    for each in itertools.takewhile(lambda happening: happening.at < begin + seconds, fast):
        outgoing = Outgoing.of(each.topic.full_name(RUN), each.message, key=each.key)
        made.append((each.at, partial(append_raw, bus, outgoing, each.partition, each.at)))
    async with _served(bus, iter(made), RunState(RUN)) as dashboard:
        yield dashboard


@asynccontextmanager
async def _served(
    bus: MemoryBus,
    coming: Iterator[tuple[float, Callable[[], None]]],
    state: RunState,
    root: Path = Path("nowhere"),
    listed: Listed = nothing,
) -> AsyncIterator[Served]:
    stop = asyncio.Event()
    context = DashboardContext(bus, state, f"runs/{RUN}", lambda: lambda token: VOCABULARY[token % len(VOCABULARY)])
    shown = ShownRun(UpdateStream(state), context, stop=stop)
    runner = web.AppRunner(build_app(ShownRuns(shown, root, listed)), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    address = await bind(runner, "127.0.0.1", 0)
    tasks = [asyncio.create_task(RunFeed(bus, state, SHARDS).run(stop))]

    tasks.append(asyncio.create_task(_go_on(bus, coming)))
    try:
        yield Served(address, bus, state, context)
    finally:
        stop.set()
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()


async def _go_on(bus: MemoryBus, coming: Iterator[tuple[float, Callable[[], None]]]) -> None:
    """Write each record at its time, in bursts of a hundredth of a second."""
    for at, write in coming:
        if (ahead := at - time.time()) > 0:
            async with bus.arrived:
                bus.arrived.notify_all()
            await asyncio.sleep(max(ahead, 0.01))
        write()
