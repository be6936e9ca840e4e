"""`streamrl ui` over a run that goes on, read by a few browsers, and ended as a signal ends it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.memory import MemoryBus
from streamrl.inspection.dashboard import server, shown
from streamrl.inspection.dashboard.server import UPDATES
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.observability.record_index.store import RecordIndex
from streamrl.observability.run_state.feed import RunFeed
from streamrl.observability.run_state.state import RunState
from tests.chaos.stops.moment import Subject
from tests.chaos.stops.relay import _port_left
from tests.inspection.dashboard.served import RUN, _go_on
from tests.observability.run_state.made_up_run import SHARDS, MadeUpRun
from tests.observability.run_state.writing import append, append_letters, topics_of

READERS = 4
PATHS = ("/", "/api/snapshot", "/api/dead-letters", "/api/trajectory?id=1@2", "/api/trajectory?id=0@7")


class Looked:
    """A bus in memory, with what only that of Kafka has."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus, self.availability = bus, SimpleNamespace(explanation="")

    def for_single_records(self) -> MemoryBus:
        return self._bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


class Connection:
    """What the command asks of one."""

    settings = None
    reward_weights: dict[str, float] = {}
    run, address = RUN, "memory"

    def __init__(self, bus: MemoryBus, directory: Path) -> None:
        self.directory, self.bus = directory, Looked(bus)

    async def with_run(self) -> "Connection":
        return self

    def new_state(self) -> RunState:
        return RunConnection(KafkaSettings(), RUN).new_state()


@dataclass
class Seen:
    """How often readers were answered, and what they should not have been told."""

    answered: int = 0
    told: list[str] = field(default_factory=list)


async def _read(session: aiohttp.ClientSession, address: str, random: Random, seen: Seen) -> None:
    while True:
        path = random.choice((*PATHS, UPDATES))
        try:
            async with session.get(f"{address}{path}") as response:
                await (response.content.readline() if path == UPDATES else response.read())
                seen.answered += 1
                if response.status == 500:
                    seen.told.append(f"{path} was answered with 500")
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def page(root: Path, random: Random) -> AsyncIterator[Subject]:
    bus, now, (port,) = topics_of(RUN), time.time(), free_ports(1)
    happenings = MadeUpRun(now - 20.0).happenings()
    for happening in happenings:
        append(bus, RUN, happening)
        if happening.at > now:
            break
    append_letters(bus, RUN, now)
    seen, index = Seen(), root / "index.sqlite"

    async def feed_of(_connection: Any, state: Any, *_: Any) -> RunFeed:
        return RunFeed(bus, state, SHARDS)

    async def run(stop: asyncio.Event) -> None:
        # As a signal ends it, which is the only way that it has.
        stopping = asyncio.create_task(_interrupt(stop))
        try:
            options = server.ServingOptions("127.0.0.1", port, open_browser=False)
            await server._serve(Connection(bus, root), None, lambda _: (), options)  # type: ignore[arg-type]
        finally:
            stopping.cancel()
            await asyncio.wait({stopping})

    async def load() -> None:
        going_on = ((each.at, partial(append, bus, RUN, each)) for each in happenings)
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(_go_on(bus, going_on))
            for _ in range(READERS):
                tasks.create_task(_read(session, f"http://127.0.0.1:{port}", random, seen))

    async def judge() -> list[str]:
        RecordIndex(index).close()
        left = [f"left by sqlite: {one.name}" for one in root.glob("index.sqlite-*")]
        return [*seen.told[:3], *_port_left(port), *left]

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    patched = mock.patch.multiple(
        shown, feed_of=feed_of, open_index=lambda *_: RecordIndex(index), give_way_when=_nothing
    )
    with patched, mock.patch.object(server, "tune_garbage_collector"):
        yield Subject(run, load, lambda: seen.answered > 5, judge)
    for number, handler in before.items():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, handler)


async def _nothing(*_: object) -> None:
    """The process's priority is the harness's."""


async def _interrupt(stop: asyncio.Event) -> None:
    await stop.wait()
    while signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
