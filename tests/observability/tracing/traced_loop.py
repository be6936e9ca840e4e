"""A whole loop of traced roles that only pass messages on, by hand, on any bus."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.bus.port import Bus, Outgoing, Record
from streamrl.observability.interceptor import observed
from streamrl.observability.tracing.context import LoggedTraces, TraceSpan
from streamrl.observability.tracing.role_tracers import tracing_of
from streamrl.producers.generation.engines.port import Engine, GenerationRequest
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import RecordRef, StepReport
from streamrl.schemas.topics import CONTROL, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from streamrl.schemas.trajectories import SamplingParams, Trajectory, WorkOrder
from streamrl.schemas.weights import MANIFEST
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings
from tests.fakes.engine import FakeEngine
from tests.progress import patience
from tests.schemas.examples import examples, trajectory, work_order

VERSION = PolicyVersion(2, 4)


def settings(run: str) -> Settings:
    return validated(
        {
            "run": {"name": run},
            "model": {"path": "m"},
            "data": {"path": "p.jsonl"},
            "telemetry": {"traces": "file"},
        }
    )


@dataclass
class Role:
    """What a traced role is built with."""

    bus: Bus
    engine: Engine


@dataclass
class TracedLoop:
    """``spans``: of all roles. ``ratio``: the share that the dispatcher traces; ``others``: that of all other roles."""

    bus: Bus
    settings: Settings
    ratio: float = 1.0
    others: float = 1.0
    spans: list[TraceSpan] = field(default_factory=list)
    logged: LoggedTraces = field(default_factory=LoggedTraces)

    def role(self, name: str) -> Role:
        """A traced role."""
        process = "worker-1" if name == "worker" else name
        ratio = self.ratio if name == "dispatcher" else self.others
        tracing = tracing_of(name, process, self.settings.run.name, ratio, self.spans.append, self.logged)
        assert tracing is not None
        engine = tracing.around(FakeEngine(version=VERSION, started=True))
        return Role(observed(self.bus, tracing.observer), engine)

    def full(self, topic: Topic) -> str:
        return topic.full_name(self.settings.run.name)

    async def commit(self, role: Role, topic: Topic, message: Message, key: str) -> None:
        publisher = await role.bus.transactional(f"{self.settings.run.name}.{topic.name}")
        await publisher.commit([Outgoing.of(self.full(topic), message, key=key, partition=0)])
        await publisher.close()

    async def first(self, role: Role, topic: Topic, kind: type[Message]) -> Record:
        """The first record of a topic, as the role reads it."""
        subscription = await role.bus.subscribe([self.full(topic)], client_id="reader")
        try:
            async with patience(20):
                while not (records := await subscription.poll(timeout_s=0.2)):
                    pass
        finally:
            await subscription.close()
        assert isinstance(records[0].message(), kind)
        return records[0]

    async def play(self, weights: Path) -> dict[str, Record]:
        """One group of one sample, from its order to the weights that came of it; the records by topic."""
        dispatcher, worker, trainer, coordinator = map(self.role, ("dispatcher", "worker", "trainer", "coordinator"))
        order: WorkOrder = work_order("What is 2 + 2?").replace(attempt=0)
        await self.commit(dispatcher, WORK_ORDERS, order, order.group_id)
        records = {"work-orders": await self.first(worker, WORK_ORDERS, WorkOrder)}
        one = trajectory(attempt=0, reward_errors={})
        await self.generate(worker, one)
        publisher = await worker.bus.publisher("worker-1")
        await publisher.publish(Outgoing.of(self.full(TRAJECTORIES), one, key=one.group_id, partition=0))
        await publisher.close()
        records["trajectories"] = read = await self.first(trainer, TRAJECTORIES, Trajectory)
        await self.commit(trainer, STEPS, self.report(one, read), "grpo")
        records["steps"] = await self.first(coordinator, STEPS, StepReport)
        (weights / MANIFEST).write_text("{}")
        ready = examples()["control-weights-ready"].replace(manifest_sha256=sha256_of(weights / MANIFEST))
        await self.commit(coordinator, CONTROL, ready, "weights/policy")
        records["control"] = await self.first(worker, CONTROL, WeightsReady)
        await worker.engine.adopt(weights, VERSION)
        return records

    @staticmethod
    async def generate(worker: Role, one: Trajectory) -> None:
        request = GenerationRequest(one.trajectory_id, [1, 2], SamplingParams(max_completion_length=8))
        assert [delta async for delta in worker.engine.generate(request)][-1].finish_reason is not None

    @staticmethod
    def report(one: Trajectory, read: Record) -> StepReport:
        ref = RecordRef(one.trajectory_id, read.partition, read.offset)
        changes: dict[str, Any] = {"micro_batches": ((ref,),), "group_ids": (one.group_id,)}
        report: StepReport = examples()["step-report"].replace(**changes)  # type: ignore[assignment]
        return report
