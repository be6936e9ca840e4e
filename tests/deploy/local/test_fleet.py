import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.deploy.local.fleet import Fleet
from streamrl.deploy.local.supervisor import ChildSpec, Supervisor
from streamrl.schemas.control import FleetTarget, OperatorCommand, control_key
from streamrl.schemas.topics import COMMANDS, CONTROL
from tests.fakes.topics import create_topics
from tests.fakes.waiting import until

WORKER = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
"""Works until it is asked to leave."""


@dataclass
class Scene:
    bus: MemoryBus
    supervisor: Supervisor
    directory: Path
    sequence: int = field(default=0)

    async def want(self, workers: int) -> None:
        self.sequence += 1
        target = FleetTarget(sequence=self.sequence, sent_at=0.0, workers=workers)
        publisher = await self.bus.publisher("coordinator")
        await publisher.publish(Outgoing.of(CONTROL.full_name("r"), target, key=control_key(target)))

    def workers(self) -> set[str]:
        return set(self.supervisor.children)

    def asked(self) -> list[str | None]:
        log = self.bus.log(COMMANDS.full_name("r")).partitions
        commands = [record.message() for partition in log for record in partition]
        return [command.worker_id for command in commands if isinstance(command, OperatorCommand)]

    def leave(self, worker: str) -> None:
        (self.directory / worker).touch()


def spec_in(directory: Path) -> Callable[[int], ChildSpec]:
    def spec(number: int) -> ChildSpec:
        name = f"worker-{number}"
        return ChildSpec(name, [sys.executable, "-c", WORKER, str(directory / name)], directory / f"{name}.log")

    return spec


@asynccontextmanager
async def fleet(directory: Path, *, initial: int, most: int, wanted: int | None = None) -> AsyncIterator[Scene]:
    bus = create_topics(MemoryBus(), "r", 4)
    spec = spec_in(directory)
    supervisor = Supervisor([spec(number) for number in range(initial)], max_restarts=0, grace_s=5)
    scene, stop = Scene(bus, supervisor, directory), asyncio.Event()
    if wanted is not None:
        await scene.want(wanted)
    loops = Fleet(bus, "r", supervisor, spec, initial, most).run(stop), supervisor.run(stop)
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await until(lambda: len(scene.workers()) >= initial)
        yield scene
    finally:
        stop.set()
        await asyncio.gather(*tasks)
    assert not scene.workers()


async def test_wanted_workers_are_started_up_to_the_most(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=3) as scene:
        await scene.want(9)
        await until(lambda: scene.workers() == {"worker-0", "worker-1", "worker-2"})
        assert scene.asked() == []


async def test_a_worker_that_leaves_loses_nothing_as_it_is_asked_to_and_never_ended(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=3, wanted=3) as scene:
        await until(lambda: len(scene.workers()) == 3)
        await scene.want(1)
        await until(lambda: scene.asked() == ["worker-2", "worker-1"])
        await asyncio.sleep(0.3)
        assert len(scene.workers()) == 3
        for worker in ("worker-1", "worker-2"):
            scene.leave(worker)
        await until(lambda: scene.workers() == {"worker-0"})


async def test_those_that_are_there_from_the_beginning_stay(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=2, most=3) as scene:
        await scene.want(0)
        await asyncio.sleep(0.8)
        assert scene.asked() == []


async def test_a_worker_is_started_anew_under_the_id_of_one_that_left(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=2, wanted=2) as scene:
        await until(lambda: len(scene.workers()) == 2)
        await scene.want(1)
        await until(lambda: scene.asked() == ["worker-1"])
        scene.leave("worker-1")
        await until(lambda: scene.workers() == {"worker-0"})
        (tmp_path / "worker-1").unlink()
        await scene.want(2)
        await until(lambda: scene.workers() == {"worker-0", "worker-1"})


async def test_workers_are_started_while_as_many_as_there_may_be_are_leaving(tmp_path: Path) -> None:
    async with fleet(tmp_path, initial=1, most=4, wanted=4) as scene:
        await until(lambda: len(scene.workers()) == 4)
        await scene.want(1)
        await until(lambda: set(scene.asked()) == {"worker-1", "worker-2", "worker-3"})
        await scene.want(4)
        await until(lambda: scene.workers() == {f"worker-{number}" for number in range(7)})
