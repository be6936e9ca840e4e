"""The evaluator on a bus in memory, among workers that the test plays."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.clocks import Clocks
from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.bus.port import Outgoing
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.evaluation.evaluator import Evaluator, HeldOutTask
from streamrl.producers.evaluation.settings import HeldOutSettings
from streamrl.producers.evaluation.state import HeldOutPrompts
from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.control import RunFinished
from streamrl.schemas.errors import Superseded
from streamrl.schemas.evaluation import EvaluationOrder, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION, Message
from streamrl.schemas.reports import Heartbeat, StepReport, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import (
    CATALOGUE,
    CONTROL,
    EVALUATION_ORDERS,
    EVALUATION_SAMPLES,
    EVALUATIONS,
    HEARTBEATS,
    STEPS,
    TRAJECTORIES,
    WORK_ORDERS,
    Topic,
)
from streamrl.schemas.trajectories import Prompt, VersionSpan, origin_of
from tests.coordinator.factories import step_report
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
class Stage:
    """A run of which only the evaluator is real. ``now``: its monotonic clock."""

    path: Path
    bus: WatchedBus = field(default_factory=WatchedBus)
    now: float = 100.0
    beats: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch

    def __post_init__(self) -> None:
        for topic in CATALOGUE:
            self.bus.create_topic(topic.full_name(RUN), topic.partition_count(8))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        data = {"easy": DataSettings(dataset="chain_sum"), "hard": DataSettings(dataset="chain_sum")}
        settings = HeldOutSettings(**{"data": data, "every": 2, "samples": 2, "share": 0.25} | self.settings)
        evaluator = Evaluator(
            self.bus,
            RUN,
            LoopSettings(heartbeat_timeout_s=10.0),
            DispatchSettings(order_timeout_s=20.0, max_attempts=3),
            HeldOutTask(held_out, settings, {"right": 1.0}),
            self.path / "metrics.jsonl",
            Clocks(monotonic=lambda: self.now),
            policies=self.policies,
        )
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
        publisher = await self.bus.publisher("test")
        await publisher.publish(Outgoing.of(topic.full_name(scope), message, key=key))

    async def beat(self, worker: str = "w0", number: int = 0, *, incarnation: str = "a", **changes: Any) -> None:
        self.beats += 1
        beat = Heartbeat(
            worker_id=worker,
            incarnation=incarnation,
            state=WorkerState.READY,
            engine="fake",
            version=PolicyVersion(1, number),
            capacity=16,
            running=0,
            waiting=0,
            generated_tokens=0,
            finished_trajectories=0,
            tokens_per_s=0.0,
            wire=WIRE_VERSION,
            sequence=self.beats,
            sent_at=0.0,
        )
        await self.send(HEARTBEATS, beat.replace(**changes))

    async def pass_time(self, seconds: float, state: WorkerState) -> None:
        """In steps that are no stand-still of the evaluator's, at each of which worker w2 says that it is there."""
        until_s = self.now + seconds
        while self.now < until_s:
            self.now += 4.0
            await self.beat("w2", state=state)
            await asyncio.sleep(0.01)

    def read(self, topic: Topic) -> list[Any]:
        return [r.message() for partition in self.bus.log(topic.full_name(RUN)).partitions for r in partition]

    @property
    def orders(self) -> list[EvaluationOrder]:
        return self.read(EVALUATION_ORDERS)

    @property
    def reports(self) -> list[EvaluationReport]:
        return self.read(EVALUATIONS)

    async def deliver(
        self, order: EvaluationOrder, reward: float = 1.0, *, newest: PolicyVersion | None = None
    ) -> None:
        for index in order.sample_indices:
            span = VersionSpan(version=newest or order.version, start=0, end=5)
            made = origin_of(order.work_order(), index) | {"rewards": {"right": reward}, "version_spans": (span,)}
            await self.send(EVALUATION_SAMPLES, trajectory(**made), order.group_id)

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_weights_are_evaluated_by_workers_that_hold_them_and_reported_once(stage: Stage) -> None:
    async with stage.running():
        await stage.send(STEPS, step_report(1, 0))
        await stage.beat("w0", 0)
        # Of 16 slots a quarter are the evaluation's, and twice as many samples are sent: four prompts of two.
        await until(lambda: len(stage.orders) == 4)
        await stage.send(STEPS, step_report(1, 1))  # not due
        first = stage.orders
        assert {order.version for order in first} == {PolicyVersion(1, 0)}
        assert first[0].group_id == "evaluation:easy/0/1-0"
        await stage.deliver(first[0])
        await until(lambda: len(stage.orders) == 5)
        for order in stage.orders[1:]:
            await stage.deliver(order, float("easy" in order.group_id), newest=PolicyVersion(1, 1))
        await stage.deliver(first[0], 0.0)  # a repeat counts for nothing
        await until(lambda: stage.reports)
        await stage.send(STEPS, step_report(1, 2))
        await asyncio.sleep(0.02)
        assert len(stage.orders) == 5  # nobody holds them yet
        await stage.beat("w0", 2)
        await until(lambda: len(stage.orders) > 5)
    (report,) = stage.reports
    assert (report.version, report.prompts, report.samples, report.missing) == (PolicyVersion(1, 0), PROMPTS, 10, 0)
    assert (report.oldest, report.newest) == (PolicyVersion(1, 0), PolicyVersion(1, 1))
    assert {name: value for name, value in report.metrics.items() if "pass@" in name} == {
        "eval/easy/pass@1": 1.0,
        "eval/easy/pass@2": 1.0,
        "eval/hard/pass@1": 0.0,
        "eval/hard/pass@2": 0.0,
        "eval/pass@1": pytest.approx(0.6),
        "eval/pass@2": pytest.approx(0.6),
    }
    assert [(line["step"], line["evaluated"], line["eval/hard/pass@1"]) for line in stage.lines] == [(0, "1-0", 0.0)]


async def test_evaluation_trains_nothing(stage: Stage) -> None:
    async with stage.running():
        await stage.send(STEPS, step_report(1, 0))
        await stage.beat()
        await until(lambda: stage.orders)
    assert not stage.read(WORK_ORDERS)
    assert not stage.read(TRAJECTORIES)


async def test_every_sample_ends_or_is_given_up_after_so_many_lost_workers(stage: Stage) -> None:
    stage.settings = {"samples": 1}
    async with stage.running():
        await stage.send(STEPS, step_report(1, 0))
        await stage.beat("w0")
        await until(lambda: len(stage.orders) == PROMPTS)
        lost, *others = stage.orders
        for order in others:
            await stage.deliver(order)
        # Its process was replaced; then the other worker falls silent; then the third does not deliver.
        await stage.beat("w0", incarnation="b", state=WorkerState.PAUSED)
        await stage.beat("w1")
        await until(lambda: len(stage.orders) == PROMPTS + 1)
        await stage.pass_time(12.0, WorkerState.PAUSED)
        await stage.beat("w2")
        await until(lambda: len(stage.orders) == PROMPTS + 2)
        again = stage.orders[PROMPTS:]
        assert [(order.worker_id, order.group_id, order.attempt) for order in again] == [
            ("w1", lost.group_id, 1),
            ("w2", lost.group_id, 2),
        ]
        await stage.pass_time(85.0, WorkerState.READY)
        await until(lambda: stage.reports)
    (report,) = stage.reports
    assert (report.samples, report.missing) == (PROMPTS - 1, 1)
    assert report.metrics["eval/pass@1"] == pytest.approx((PROMPTS - 1) / PROMPTS)


async def test_what_a_worker_declines_is_ordered_elsewhere_at_once_and_is_no_loss(stage: Stage) -> None:
    """It turned to an arm and back before it was heard again: its weights are the served policy's as they were."""
    stage.settings = {"samples": 1}
    async with stage.running():
        await stage.send(STEPS, step_report(1, 0))
        await stage.beat("w0")
        await until(lambda: len(stage.orders) == PROMPTS)
        await stage.deliver(stage.orders[0])
        declined = {order.group_id: 0 for order in stage.orders[:3]}
        await stage.beat("w0", declined=declined)
        await asyncio.sleep(0.02)
        assert len(stage.orders) == PROMPTS, "what it may decline as well is not sent to it"
        # More often than workers may be lost with a prompt, and one of them is heard behind its next heartbeat.
        await stage.beat("w1")
        for attempt in (1, 2, 3, 4):
            await until(lambda: len(stage.orders) == PROMPTS + 2 * attempt)  # noqa: B023
            again = stage.orders[-2:]
            assert {order.group_id for order in again} == {order.group_id for order in stage.orders[1:3]}
            assert {(order.worker_id, order.attempt) for order in again} == {(f"w{attempt}", attempt)}
            if attempt < 4:
                await stage.beat(f"w{attempt}", declined=declined | {order.group_id: attempt for order in again})
                await stage.beat(f"w{attempt}", state=WorkerState.PAUSED)
                await stage.beat(f"w{attempt + 1}")
        for order in (*stage.orders[3:PROMPTS], *again):
            await stage.deliver(order)
        await until(lambda: stage.reports)
    (report,) = stage.reports
    assert (report.samples, report.missing) == (PROMPTS, 0)


async def test_a_restarted_evaluator_orders_what_is_missing_and_a_version_is_reported_once(stage: Stage) -> None:
    stage.settings = {"samples": 1}
    async with stage.running():
        await stage.send(STEPS, step_report(1, 0))
        await stage.beat()
        await until(lambda: len(stage.orders) == PROMPTS)
        for order in stage.orders[:3]:
            await stage.deliver(order)
    async with stage.running():
        await stage.beat()
        await until(lambda: len(stage.orders) == PROMPTS + 2)
        assert {order.group_id for order in stage.orders[PROMPTS:]} == {o.group_id for o in stage.orders[3:PROMPTS]}
        for order in stage.orders[PROMPTS:]:
            await stage.deliver(order)
        await until(lambda: stage.lines)
    (stage.path / "metrics.jsonl").unlink()  # killed between its report and the file
    async with stage.running():
        await until(lambda: stage.lines)
        await stage.beat()
        await asyncio.sleep(0.05)
    assert len(stage.orders) == PROMPTS + 2
    assert [line["evaluated"] for line in stage.lines] == ["1-0"]
    assert len(stage.reports) == 1


async def test_only_newest_weights_are_due_of_those_that_became_so_meanwhile(stage: Stage) -> None:
    stage.settings = {"samples": 1}
    async with stage.running():
        await stage.send(STEPS, step_report(1, 0))
        await stage.beat("w0", 6)
        await until(lambda: len(stage.orders) == PROMPTS)
        for number in range(1, 7):
            await stage.send(STEPS, step_report(1, number))
        await asyncio.sleep(0.02)
        for order in stage.orders:
            await stage.deliver(order)
        await until(lambda: len(stage.orders) == 2 * PROMPTS)
    assert {order.version.number for order in stage.orders[PROMPTS:]} == {6}


async def test_weights_that_a_crash_undid_are_dropped_and_those_it_went_on_from_are_not_evaluated_again(
    stage: Stage,
) -> None:
    stage.settings = {"samples": 1}

    def resumed(lineage: int, number: int, parent: int) -> StepReport:
        return step_report(lineage, number).replace(parent=PolicyVersion(1, parent))

    async with stage.running():
        await stage.send(STEPS, step_report(1, 2))
        await stage.beat("w0", 2)
        await until(lambda: len(stage.orders) == PROMPTS)
        for order in stage.orders:
            await stage.deliver(order)
        await until(lambda: stage.reports)
        await stage.send(STEPS, step_report(1, 4))
        await stage.beat("w0", 4)
        await until(lambda: len(stage.orders) == 2 * PROMPTS)
        await stage.send(STEPS, resumed(2, 2, parent=2))
        await stage.beat("w0", version=PolicyVersion(2, 2))
        await asyncio.sleep(0.05)
        assert len(stage.orders) == 2 * PROMPTS
        await stage.send(STEPS, step_report(2, 4))
        await stage.beat("w0", version=PolicyVersion(2, 4))
        await until(lambda: len(stage.orders) == 3 * PROMPTS)
    assert {order.version for order in stage.orders[2 * PROMPTS :]} == {PolicyVersion(2, 4)}


async def test_it_ends_once_the_last_weights_are_reported_or_after_its_patience(stage: Stage) -> None:
    stage.settings = {"samples": 1, "patience_s": 50.0}
    async with stage.running() as task:
        await stage.beat("w0", 4)
        await stage.send(STEPS, step_report(1, 4, finished=True))
        await until(lambda: len(stage.orders) == PROMPTS)
        await asyncio.sleep(0.02)
        assert not task.done()
        for order in stage.orders:
            await stage.deliver(order)
        await until(task.done)
    assert len(stage.reports) == 1
    async with stage.running() as task:  # of a run that was over when it began
        await until(task.done)
    await stage.send(STEPS, step_report(1, 6, finished=True))
    async with stage.running() as task:
        await stage.beat("w0", 6)
        await until(lambda: len(stage.orders) == 2 * PROMPTS)
        stage.now += 51.0
        await until(task.done)
    assert len(stage.reports) == 1


async def test_one_evaluator_reports_and_ends_with_the_run_or_when_another_took_over(stage: Stage) -> None:
    await stage.send(STEPS, step_report(1, 4))
    async with stage.running() as task:
        await stage.beat("w0", 4)
        await until(lambda: stage.orders)
        await stage.send(CONTROL, RunFinished(sequence=0, sent_at=0.0, step=4, reason="test"))
        await until(task.done)
    async with stage.running() as task:
        await until(lambda: len(stage.orders) >= 1)
        await asyncio.sleep(0.02)
        await stage.bus.transactional(f"{RUN}.evaluator")
        await stage.beat("w1", 4)
        await until(task.done)
    assert isinstance(task.exception(), Superseded)
