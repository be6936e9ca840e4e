"""An evaluator on a bus in memory, among workers that the test plays."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.bus.clocks import Clocks
from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.evaluation.evaluator import Evaluator, HeldOutTask
from streamrl.producers.evaluation.settings import HeldOutSettings
from streamrl.producers.evaluation.state import HeldOutPrompts
from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.evaluation import EvaluationOrder, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION, Message
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import (
    EVALUATION_ORDERS,
    EVALUATION_SAMPLES,
    EVALUATIONS,
    HEARTBEATS,
    Topic,
)
from streamrl.schemas.trajectories import Prompt, VersionSpan, fields_from_order
from tests.fakes.messages import heartbeat
from tests.fakes.topics import create_topics, messages_of, send
from tests.fakes.waiting import until
from tests.schemas.examples import trajectory

RUN = "r"
PROMPTS = 5


def held_out() -> HeldOutPrompts:
    prompts = [Prompt(prompt_id=f"d/{index}", dataset="d", content=f"{index}?") for index in range(PROMPTS)]
    return HeldOutPrompts.of({"easy": prompts[:3], "hard": prompts[3:]})


class WatchedBus(MemoryBus):
    """Notes who hears heartbeats: one that was sent before is not heard. ``before``: what happens right before a topic
    is read for the first time."""

    listeners = 0

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}

    async def subscribe(self, topics: Iterable[str], **options: Any) -> MemorySubscription:
        names = list(topics)
        for name in names:
            if (happens := self.before.pop(name, None)) is not None:
                await happens()
        subscription = await super().subscribe(names, **options)
        self.listeners += HEARTBEATS.full_name(RUN) in names
        return subscription


@dataclass
class EvaluatorHarness:
    """A run of which only the evaluator is real. ``now``: its monotonic clock."""

    path: Path
    bus: WatchedBus = field(default_factory=WatchedBus)
    now: float = 100.0
    beats: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch

    def __post_init__(self) -> None:
        create_topics(self.bus, RUN)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        data = {"easy": DataSettings(dataset="chain_sum"), "hard": DataSettings(dataset="chain_sum")}
        settings = HeldOutSettings(**{"data": data, "every": 2, "samples": 2} | self.settings)
        evaluator = Evaluator(
            self.bus,
            RUN,
            LoopSettings(heartbeat_timeout_s=10.0),
            DispatchSettings(order_timeout_s=20.0),
            HeldOutTask(held_out, settings, {"right": 1.0}, max_unrewarded_share=0.2),
            self.path / "metrics.jsonl",
            Clocks(monotonic=lambda: self.now),
            policies=self.policies,
        )
        evaluator.max_attempts = 3
        stop = asyncio.Event()
        listeners, task = self.bus.listeners, asyncio.create_task(evaluator.run(stop))
        try:
            await until(lambda: self.bus.listeners > listeners or task.done())
            yield task
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=5)
            assert task.done()

    async def send(self, topic: Topic, message: Message, key: str = "k", scope: str = RUN) -> None:
        await send(self.bus, scope, topic, message, key)

    async def beat(self, worker: str = "w0", number: int = 0, *, incarnation: str = "a", **changes: Any) -> None:
        self.beats += 1
        fields = {"version": PolicyVersion(1, number), "incarnation": incarnation, "capacity": 32, "wire": WIRE_VERSION}
        await self.send(HEARTBEATS, heartbeat(worker, sequence=self.beats, **fields | changes))

    async def pass_time(self, seconds: float, state: WorkerState) -> None:
        """In steps that are no stand-still of the evaluator's, at each of which worker w2 says that it is there."""
        until_s = self.now + seconds
        while self.now < until_s:
            self.now += 4.0
            await self.beat("w2", state=state)
            await asyncio.sleep(0.01)

    @property
    def orders(self) -> list[EvaluationOrder]:
        return messages_of(self.bus, RUN, EVALUATION_ORDERS, EvaluationOrder)

    @property
    def reports(self) -> list[EvaluationReport]:
        return messages_of(self.bus, RUN, EVALUATIONS, EvaluationReport)

    async def deliver(
        self,
        order: EvaluationOrder,
        reward: float = 1.0,
        *,
        newest: PolicyVersion | None = None,
        errors: Mapping[str, str] | None = None,
    ) -> None:
        for index in order.sample_indices:
            span = VersionSpan(version=newest or order.version, start=0, end=5)
            made = fields_from_order(order.work_order(), index) | {
                "rewards": {"right": None if errors else reward},
                "reward_errors": dict(errors or {}),
                "version_spans": (span,),
            }
            await self.send(EVALUATION_SAMPLES, trajectory(**made), order.group_id)

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
