"""A worker among a bus in memory, a relay of weights and a fake engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.clocks import Clocks
from streamrl.bus.port import Outgoing
from streamrl.producers.generation.pace import WorkerPace, pace_of
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.side_work import SideWorkFactory
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.schemas.control import Control, WorkerClaimed
from streamrl.schemas.identifiers import PolicyVersion, partition_of_worker
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import Heartbeat, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import HEARTBEATS, TRAJECTORIES, WORK_ORDERS, Topic
from streamrl.schemas.trajectories import Trajectory, WorkOrder
from streamrl.weights.fetch import WeightsFetcher
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.publisher import FailingBus
from tests.fakes.scorer import FakeScorer
from tests.fakes.series import OrderedSeries
from tests.fakes.topics import create_topics, messages_of, records_of, send, send_control
from tests.fakes.waiting import until
from tests.producers.generation.factories import WORKER, FakeRelay, running_relay

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
RUN = "r"


@dataclass
class WorkerHarness:
    """A worker among a memory bus, a relay and a fake engine. ``settings``: of the section, and of its pace."""

    bus: FailingBus
    relay: FakeRelay
    engine: FakeEngine
    cache: Path
    settings: dict[str, Any] = field(default_factory=dict)
    rewards: Any = field(default_factory=FakeScorer)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    monotonic: Callable[[], float] = time.monotonic
    has_graders: bool = False
    side_work: Sequence[SideWorkFactory] = ()
    running: "asyncio.Task[None] | None" = None

    def start(self) -> "asyncio.Task[None]":
        paced = {name: value for name, value in self.settings.items() if name in WorkerPace.__dataclass_fields__}
        settings = GenerationSettings(**{name: self.settings[name] for name in self.settings.keys() - paced.keys()})
        worker = GenerationWorker(
            self.bus,
            RunContext(
                RUN,
                LoopSettings(max_prompt_length=16),
                settings,
                has_graders=self.has_graders,
                wanted_series=OrderedSeries,
                pace=lambda loop: replace(pace_of(loop), **{"heartbeat_interval_s": 0.05} | paced),
            ),
            WORKER,
            self.engine,
            self.tokenizer,
            self.rewards,
            WeightsFetcher(self.cache),
            self.side_work,
            Clocks(monotonic=self.monotonic),
        )
        self.running = asyncio.create_task(worker.run(self.stop))
        return self.running

    async def send(self, topic: Topic, message: Message, key: str, partition: int | None = None) -> None:
        await send(self.bus, RUN, topic, message, key, partition)

    async def order(self, order: WorkOrder) -> None:
        await self.send(WORK_ORDERS, order, order.group_id, partition_of_worker(WORKER))

    async def control(self, message: Control) -> None:
        await send_control(self.bus, RUN, message)

    async def claim(self, incarnation: str) -> None:
        await self.control(WorkerClaimed(sequence=0, sent_at=0.0, worker_id=WORKER, incarnation=incarnation))

    def read(self, topic: Topic) -> list[Message]:
        return [record.message() for record in records_of(self.bus, RUN, topic)]

    @property
    def trajectories(self) -> list[Trajectory]:
        return messages_of(self.bus, RUN, TRAJECTORIES, Trajectory)

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return messages_of(self.bus, RUN, HEARTBEATS, Heartbeat)

    @property
    def state(self) -> WorkerState | None:
        return self.heartbeats[-1].state if self.heartbeats else None

    async def ready(self) -> "asyncio.Task[None]":
        """Start the worker, give it its first weights, and wait until it says it is ready."""
        await self.control(self.relay.add(V0))
        running = self.start()
        await until(lambda: self.state is WorkerState.READY or running.done())
        return running


MakeWorker = Callable[..., WorkerHarness]


@asynccontextmanager
async def running_workers(cache: Path) -> AsyncIterator[MakeWorker]:
    """Makes workers, which end with the block."""
    made: list[WorkerHarness] = []
    async with running_relay() as relay:

        def make(**changes: Any) -> WorkerHarness:
            bus = create_topics(changes.pop("bus", None) or FailingBus(), RUN)
            made.append(WorkerHarness(bus, relay, changes.pop("engine", None) or FakeEngine(), cache, **changes))
            return made[-1]

        yield make
        for one in made:
            one.stop.set()
            if one.running is not None:
                await asyncio.wait({one.running}, timeout=5)
                assert one.running.done()


@pytest.fixture
async def make_worker(tmp_path: Path) -> AsyncIterator[MakeWorker]:
    """Makes workers, which end with the test."""
    async with running_workers(tmp_path / "weights") as make:
        yield make


def is_about(topic: Topic) -> Callable[[Outgoing], bool]:
    """Whether a record is for this topic of the run."""
    return lambda record: record.topic == topic.full_name(RUN)
