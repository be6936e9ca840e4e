"""A finished run that is started again under its name with more steps: real coordinator, worker and dispatcher."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from streamrl.bus.memory import MemoryBus
from streamrl.coordinator.coordinator import Coordinator
from streamrl.producers.dispatch.dispatcher import Dispatcher
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.generation.pace import WorkerPace, pace_of
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.control import RunFinished
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CONTROL, STEPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.weights.fetch import WeightsFetcher
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.messages import step_report
from tests.fakes.scorer import FakeScorer
from tests.fakes.topics import create_topics, messages_of, send
from tests.fakes.waiting import until
from tests.producers.dispatch.dispatcher_harness import CountedSource
from tests.producers.generation.factories import FakeRelay, running_relay
from tests.progress import within

LOOP = LoopSettings(groups_per_step=2, num_generations=2, max_staleness=1, max_completion_length=100)


def _quick(loop: LoopSettings) -> WorkerPace:
    return replace(pace_of(loop), heartbeat_interval_s=0.05)


@dataclass
class Run:
    """The test is the trainer."""

    bus: MemoryBus
    relay: FakeRelay
    cache: Path

    async def report(self, version: PolicyVersion, *, finished: bool, groups: tuple[str, ...] = ()) -> None:
        ready = self.relay.add(version)
        made = {"manifest_sha256": ready.manifest_sha256, "group_ids": groups, "finished": finished}
        report = step_report(version.lineage, version.number, **made)
        await send(self.bus, "r", STEPS, report, "grpo")

    def groups(self) -> list[str]:
        """Whole groups, by position."""
        found = messages_of(self.bus, "r", TRAJECTORIES, Trajectory)
        whole = {one.group_id: one.position for one in found if sum(o.group_id == one.group_id for o in found) == 2}
        return sorted(whole, key=whole.__getitem__)

    @asynccontextmanager
    async def roles(self) -> AsyncIterator["list[asyncio.Task[None]]"]:
        """Worker and dispatcher, which end by themselves, and a coordinator."""
        stop = asyncio.Event()
        parts = (
            Coordinator(self.bus, "r", (self.relay.address,)),
            GenerationWorker(
                self.bus,
                RunContext("r", LOOP, GenerationSettings(), pace=_quick),
                "w0",
                FakeEngine(),
                FakeTokenizer(),
                FakeScorer(),
                WeightsFetcher(self.cache),
            ),
            Dispatcher(
                self.bus,
                "r",
                LOOP,
                DispatchSettings(),
                CountedSource(),
                ConstantLength(LOOP),
            ),
        )
        coordinator, *others = [asyncio.create_task(role.run(stop)) for role in parts]
        try:
            yield others
        finally:
            stop.set()
            await asyncio.gather(coordinator, *others)

    def compact(self) -> None:
        control = self.bus.log(CONTROL.full_name("r")).partitions[0]
        control[:] = sorted({record.key: record for record in control}.values(), key=lambda record: record.offset)


async def test_a_finished_run_goes_on_under_its_name_and_ends_at_its_new_end(tmp_path: Path) -> None:
    async with running_relay() as relay:
        run = Run(create_topics(MemoryBus(), "r", LOOP.trajectory_partitions), relay, tmp_path)
        async with run.roles() as others:
            await run.report(PolicyVersion(1, 0), finished=False)
            await until(lambda: len(run.groups()) == 4)
            await run.report(PolicyVersion(1, 1), finished=True, groups=tuple(run.groups()[:2]))
            await within(asyncio.gather(*others), 10)
        run.compact()
        async with run.roles() as others:
            await asyncio.sleep(1.0)
            assert not [task for task in others if task.done()]
            await run.report(PolicyVersion(1, 1), finished=True, groups=tuple(run.groups()[:2]))
            await run.report(PolicyVersion(2, 1), finished=False)
            await until(lambda: len(run.groups()) == 6)
            await run.report(PolicyVersion(2, 2), finished=False, groups=tuple(run.groups()[2:4]))
            await until(lambda: len(run.groups()) == 8)
            await run.report(PolicyVersion(2, 3), finished=True, groups=tuple(run.groups()[4:6]))
            await within(asyncio.gather(*others), 10)
        assert [message.step for message in messages_of(run.bus, "r", CONTROL, RunFinished)] == [1, 3]
        assert run.groups() == [f"toy/{number}/0" for number in range(len(run.groups()))]
