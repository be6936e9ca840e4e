"""A run on the in-memory bus in which the test plays workers, trainer and coordinator around a real dispatcher."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from streamrl.bus.clocks import Clocks
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Position
from streamrl.producers.dispatch.choosing import EveryPrompt, PromptChooser
from streamrl.producers.dispatch.dispatcher import ORDERS_PER_TURN, Dispatcher
from streamrl.producers.dispatch.fleet import MAX_ATTEMPTS
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import OtherRoles
from streamrl.producers.lengths.predictor import ConstantLength, LengthPredictor
from streamrl.schemas.control import Control, FlowControl, RunFinished
from streamrl.schemas.identifiers import PolicyVersion, make_trajectory_id
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import (
    Heartbeat,
    RecordRef,
    SkipReason,
    SkipRecord,
    StepReport,
)
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import (
    HEARTBEATS,
    SKIPS,
    STEPS,
    TRAJECTORIES,
    UNGRADED,
    WORK_ORDERS,
    Topic,
)
from streamrl.schemas.trajectories import (
    FinishReason,
    LengthEstimate,
    Prompt,
    ReleaseOrder,
    SamplingParams,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
)
from tests.fakes import messages
from tests.fakes.topics import create_topics, messages_of, send, send_control
from tests.progress import calm_s, within

LOOP = LoopSettings(
    groups_per_step=2, num_generations=2, max_staleness=1, max_completion_length=100, heartbeat_timeout_s=30.0
)
RUN = "r"


def version(number: int, lineage: int = 1) -> PolicyVersion:
    return PolicyVersion(lineage, number)


_SEQUENCE = itertools.count()
"""Of all heartbeats made here: each is newer than those made before."""


def heartbeat(worker: str = "w0", *, number: int = 0, lineage: int = 1, **changes: Any) -> Heartbeat:
    """Of a worker with room for more, that holds weights of this number."""
    usual = {"version": version(number, lineage), "capacity": 100, "running": 1, "sequence": next(_SEQUENCE)}
    return messages.heartbeat(worker, **usual | changes)


def order(group_id: str = "toy/0/0", worker: str = "w0", *, samples: int = 2, median: int = 10) -> WorkOrder:
    return messages.work_order(
        group_id,
        samples,
        worker_id=worker,
        estimate=LengthEstimate(median=median, upper=median, bucket=0, predictor="test"),
        sampling=SamplingParams(max_completion_length=100),
        created_at=1.0,
    )


def trajectory(of: WorkOrder, sample: int, *, length: int = 5, reason: FinishReason = FinishReason.STOP) -> Trajectory:
    """What a worker makes of an order."""
    return messages.trajectory(
        of.group_id,
        sample,
        length,
        version=of.admitted_version,
        created_at=of.created_at,
        num_generations=of.num_generations,
        finish_reason=reason,
        prompt_text=of.prompt.text,
        completion_text="answer",
        rewards={"right": 1.0},
        bucket=of.estimate.bucket,
        predicted_length=of.estimate.median,
        worker_id=of.worker_id,
        attempt=of.attempt,
        position=of.position,
        chance=of.chance,
        started_at=0.0,
        finished_at=0.0,
    )


def step_report(
    number: int, groups: Iterable[str] = (), *, lineage: int = 1, refs: tuple[RecordRef, ...] = (), **changes: Any
) -> StepReport:
    fields = {"manifest_sha256": "0" * 64, "group_ids": tuple(groups), "micro_batches": (refs,)}
    return messages.step_report(lineage, number, **fields | changes)


def skip_record(
    group_id: str | None, sample: int | None, reason: SkipReason, *, step: int = 0, offset: int = 0
) -> SkipRecord:
    name = None if group_id is None or sample is None else make_trajectory_id(group_id, sample)
    return messages.skip_record(offset, trajectory_id=name, group_id=group_id, reason=reason, step=step)


class CountedSource:
    """Prompts named by their position; remembers which positions were asked for."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.asked: list[int] = []

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        self.asked.append(position)
        data_pass, index = divmod(position, self.size)
        return Prompt(prompt_id=f"toy/{index}", dataset="toy", content=f"question {index}"), data_pass


@dataclass
class DispatcherHarness:
    """A dispatcher on a bus in memory; the test is everybody else.

    ``poll_s``, ``orders_per_turn``, ``max_attempts``: the dispatcher's.
    """

    loop: LoopSettings = LOOP
    settings: DispatchSettings = field(default_factory=DispatchSettings)
    predictor: LengthPredictor | None = None
    bus: MemoryBus = field(default_factory=MemoryBus)
    source: CountedSource = field(default_factory=CountedSource)
    clock: Callable[[], float] = time.time
    seed: int | None = None
    has_graders: bool = False
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch
    chooser: Callable[[], PromptChooser] = EveryPrompt
    poll_s: float = 0.01
    orders_per_turn: int = ORDERS_PER_TURN
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._sequence = itertools.count()
        create_topics(self.bus, RUN, self.loop.trajectory_partitions)

    async def start(self) -> Dispatcher:
        """A new dispatcher on the same bus."""
        self.stop = asyncio.Event()
        predictor, ticks = self.predictor or ConstantLength(self.loop), list[str]()
        dispatcher = Dispatcher(
            self.bus,
            RUN,
            self.loop,
            self.settings,
            self.source,
            predictor,
            Clocks(self.clock, self.clock),
            OtherRoles(seed=self.seed, has_graders=self.has_graders),
            ticks.append,
            self.policies,
            self.chooser,
        )
        dispatcher.poll_s, dispatcher.orders_per_turn = self.poll_s, self.orders_per_turn
        dispatcher.max_attempts = self.max_attempts
        self.task = asyncio.create_task(dispatcher.run(self.stop))
        while not self.task.done() and not ticks:
            await asyncio.sleep(0)  # until it has rebuilt its state: what it only recalls gets no new orders
        return dispatcher

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            await within(self.task, 5)

    async def send(
        self, topic: Topic, message: Message, key: str | None = None, partition: int | None = None
    ) -> Position:
        return await send(self.bus, RUN, topic, message, key, partition)

    async def beat(self, worker: str = "w0", **fields: object) -> None:
        await self.send(HEARTBEATS, heartbeat(worker, **fields), worker)  # type: ignore[arg-type]

    async def step(self, number: int, groups: Iterable[str] = (), **fields: object) -> None:
        await self.send(STEPS, step_report(number, groups, **fields), "grpo")  # type: ignore[arg-type]

    async def skip(self, group_id: str, sample: int, reason: SkipReason, *, step: int = 0) -> None:
        await self.send(SKIPS, skip_record(group_id, sample, reason, step=step))

    async def finish(self, of: WorkOrder, samples: Iterable[int] | None = None) -> list[RecordRef]:
        wanted = of.sample_indices if samples is None else samples
        references = []
        for sample in wanted:
            message = trajectory(of, sample)
            position = await self.send(TRAJECTORIES, message, of.group_id, of.partition)
            references.append(RecordRef(message.trajectory_id, position.partition, position.offset))
        return references

    async def sample(self, of: WorkOrder, samples: Iterable[int] | None = None) -> None:
        """What a worker does where graders come behind it."""
        for sample in of.sample_indices if samples is None else samples:
            message = UngradedTrajectory.of(trajectory(of, sample), of.prompt)
            await self.send(UNGRADED, message, of.group_id, of.partition)

    async def control(self, message: Control) -> None:
        await send_control(self.bus, RUN, message)

    async def flow(self, mode: str) -> None:
        await self.control(FlowControl(sequence=next(self._sequence), sent_at=0.0, mode=mode))

    async def finish_run(self, step: int = 1) -> None:
        await self.control(RunFinished(sequence=next(self._sequence), sent_at=0.0, step=step))

    def orders(self, worker: str | None = None) -> list[WorkOrder]:
        """All orders on the topic by position and attempt."""
        found = messages_of(self.bus, RUN, WORK_ORDERS, WorkOrder)
        mine = [one for one in found if worker in (None, one.worker_id)]
        return sorted(mine, key=lambda one: (one.position, one.attempt))

    def taken_back(self) -> list[ReleaseOrder]:
        """What workers were asked to let go of."""
        return messages_of(self.bus, RUN, WORK_ORDERS, ReleaseOrder)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
        deadline = calm_s() + timeout_s
        while not condition():
            assert calm_s() < deadline, f"still waiting; orders: {[o.group_id for o in self.orders()]}"
            if self.task is not None and self.task.done():
                await self.task
            await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Long enough for the dispatcher to have acted on everything sent so far."""
        await asyncio.sleep(0.1)
