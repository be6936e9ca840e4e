import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.deploy.local.fleet import Fleet
from streamrl.deploy.local.supervisor import ChildSpec, Supervisor
from streamrl.schemas.control import FleetTarget, OperatorCommand
from streamrl.schemas.topics import COMMANDS
from tests.fakes.topics import create_topics, messages_of, send_control
from tests.fakes.waiting import until

pytestmark = pytest.mark.processes

WORKER = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
"""Works until it is asked to leave."""


@dataclass
class FleetHarness:
    bus: MemoryBus
    supervisor: Supervisor
    directory: Path
    sequence: int = field(default=0)

    async def want(self, workers: int) -> None:
        self.sequence += 1
        target = FleetTarget(sequence=self.sequence, sent_at=0.0, workers=workers)
        await send_control(self.bus, "r", target)

    def workers(self) -> set[str]:
        return set(self.supervisor.children)

    def asked(self) -> list[str | None]:
        return [command.worker_id for command in messages_of(self.bus, "r", COMMANDS, OperatorCommand)]

    def leave(self, worker: str) -> None:
        (self.directory / worker).touch()


def spec_in(directory: Path) -> Callable[[int], ChildSpec]:
    def spec(number: int) -> ChildSpec:
        name = f"worker-{number}"
        return ChildSpec(name, [sys.executable, "-c", WORKER, str(directory / name)], directory / f"{name}.log")

    return spec


@asynccontextmanager
async def fleet(directory: Path, *, initial: int, most: int, wanted: int | None = None) -> AsyncIterator[FleetHarness]:
    bus = create_topics(MemoryBus(), "r", 4)
    spec = spec_in(directory)
    supervisor = Supervisor([spec(number) for number in range(initial)], max_restarts=0, grace_s=5)
    harness, stop = FleetHarness(bus, supervisor, directory), asyncio.Event()
    if wanted is not None:
        await harness.want(wanted)
    loops = Fleet(bus, "r", supervisor, spec, initial, most).run(stop), supervisor.run(stop)
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await until(lambda: len(harness.workers()) >= initial)
        yield harness
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    assert not harness.workers()


async def test_wanted_workers_are_started_up_to_the_most(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=3) as harness:
        await harness.want(9)
        await until(lambda: harness.workers() == {"worker-0", "worker-1", "worker-2"})
        assert harness.asked() == []


async def test_a_worker_that_leaves_loses_nothing_as_it_is_asked_to_and_never_ended(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=3, wanted=3) as harness:
        await until(lambda: len(harness.workers()) == 3)
        await harness.want(1)
        await until(lambda: harness.asked() == ["worker-2", "worker-1"])
        await asyncio.sleep(0.3)
        assert len(harness.workers()) == 3
        for worker in ("worker-1", "worker-2"):
            harness.leave(worker)
        await until(lambda: harness.workers() == {"worker-0"})


async def test_those_that_are_there_from_the_beginning_stay(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=2, most=3) as harness:
        await harness.want(0)
        await asyncio.sleep(0.8)
        assert harness.asked() == []


async def test_a_worker_is_started_again_under_the_id_of_one_that_left(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=2, wanted=2) as harness:
        await until(lambda: len(harness.workers()) == 2)
        await harness.want(1)
        await until(lambda: harness.asked() == ["worker-1"])
        harness.leave("worker-1")
        await until(lambda: harness.workers() == {"worker-0"})
        (tmp_path / "worker-1").unlink()
        await harness.want(2)
        await until(lambda: harness.workers() == {"worker-0", "worker-1"})


async def test_workers_are_started_while_as_many_as_there_may_be_are_leaving(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=4, wanted=4) as harness:
        await until(lambda: len(harness.workers()) == 4)
        await harness.want(1)
        await until(lambda: set(harness.asked()) == {"worker-1", "worker-2", "worker-3"})
        await harness.want(4)
        await until(lambda: harness.workers() == {f"worker-{number}" for number in range(7)})
