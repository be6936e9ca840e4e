"""What the dispatcher takes back is handed over up to its last token, and nobody samples or delivers it twice."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from streamrl.bus.port import Record
from streamrl.producers.generation.engines.port import GenerationRequest, TokenDelta
from streamrl.producers.generation.outbox import Outbox
from streamrl.producers.generation.partials import PartialPool, PartialReader, longest_prefix
from streamrl.producers.generation.releases import Releases
from streamrl.producers.generation.rollout import Rollout
from streamrl.producers.generation.status import WorkerStatus
from streamrl.producers.generation.worker import OrderExecutor
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.identifiers import partial_partition_of, partition_of_worker
from streamrl.schemas.reports import ReleasedOrder, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import FinishReason, PartialSource, ReleaseOrder, WorkOrder
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.publisher import FailingBus
from tests.fakes.scorer import FakeScorer, SlowScorer
from tests.fakes.topics import send
from tests.fakes.waiting import until
from tests.producers.dispatch.dispatcher_harness import DispatcherHarness
from tests.producers.generation.factories import WORKER, work_order
from tests.producers.generation.test_partials import (
    DURABLE,
    LENGTH,
    TOPIC,
    chunks_on,
    engine,
    expected_tokens,
    held_after_compaction,
)
from tests.producers.generation.worker_harness import V0, MakeWorker, WorkerHarness, is_about
from tests.progress import within

GROUP, HELD = "d/0/0", 42
SETTINGS = DURABLE | {"partial_chunk_tokens": 256}
"""Nothing would be on record by itself before the hand-over."""


async def take_back(
    it: WorkerHarness, *, group: str = GROUP, attempt: int = 0, incarnation: str | None = None, is_settled: bool = False
) -> None:
    """``is_settled``: not taken back, but let go of long enough."""
    groups = {group: attempt}
    message = ReleaseOrder(
        worker_id=WORKER,
        incarnation=incarnation or it.heartbeats[-1].incarnation,
        groups={} if is_settled else groups,
        settled=groups if is_settled else {},
        sent_at=0.0,
    )
    await send(it.bus, "r", WORK_ORDERS, message, partition=partition_of_worker(WORKER))


def told(it: WorkerHarness) -> tuple[ReleasedOrder, ...]:
    return it.heartbeats[-1].released or ()


async def test_released_samples_are_recorded_first(make_worker: MakeWorker) -> None:
    """While the pool's topic is away nothing is told; the one that goes on samples not a token again."""
    bus = FailingBus()
    it = make_worker(bus=bus, engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
    await it.ready()
    assert it.heartbeats[-1].released == ()
    await it.order(work_order(0, samples=3))
    await until(lambda: it.engine.sampled == 3 * HELD)
    bus.fail = lambda record: BusUnavailable("away") if record.topic == TOPIC else None
    await take_back(it)
    await until(lambda: sum(record.topic == TOPIC for record in bus.attempts) >= 3)
    assert told(it) == ()
    bus.fail = lambda record: None
    await until(lambda: told(it))
    assert told(it) == (ReleasedOrder(group_id=GROUP, attempt=0, samples=((0, HELD), (1, HELD), (2, HELD))),)
    assert [len(longest_prefix(chunks_on(bus), f"{GROUP}/{n}").token_ids) for n in range(3)] == [HELD] * 3
    assert it.heartbeats[-1].generated_tokens == 3 * HELD
    assert (it.engine.running, it.trajectories) == (0, [])

    source = PartialSource(partition=partial_partition_of(WORKER), offset=it.heartbeats[-1].partials_from or 0)
    it.engine.release.set()
    await it.order(work_order(0, samples=3, attempt=1, partials=(source,), moves=1))
    await until(lambda: len(it.trajectories) == 3)
    assert it.engine.sampled == 3 * LENGTH
    for trajectory in it.trajectories:
        assert [part.start for part in trajectory.parts] == [0, HELD]
        assert trajectory.token_ids.tolist() == expected_tokens(trajectory)
        logprobs = np.array([-0.5 - token / 128 for token in expected_tokens(trajectory)], np.float32)
        assert trajectory.logprobs.tolist() == logprobs.tolist()
    await until(lambda: not held_after_compaction(bus))


async def test_one_worker_has_a_sample(make_worker: MakeWorker) -> None:
    """What is whole when it is taken back is delivered here, the others are handed over."""
    bus = FailingBus()
    it = make_worker(bus=bus, engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
    await it.ready()
    is_trajectory = is_about(TRAJECTORIES)
    bus.fail = lambda record: BusUnavailable("away") if is_trajectory(record) else None
    it.engine.release.set()
    await it.order(work_order(0, samples=3, sample_indices=(1,)))
    await until(lambda: any(map(is_trajectory, bus.attempts)))
    it.engine.release.clear()
    await it.order(work_order(0, samples=3, sample_indices=(0, 2)))
    await until(lambda: it.engine.sampled == LENGTH + 2 * HELD)
    await take_back(it)
    await until(lambda: told(it))
    bus.fail = lambda record: None
    await until(lambda: len(it.trajectories) == 1)
    assert told(it)[0].samples == ((0, HELD), (2, HELD))
    assert [one.trajectory_id for one in it.trajectories] == [f"{GROUP}/1"]


async def test_a_released_order_stays_released(make_worker: MakeWorker) -> None:
    it = make_worker(engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
    await it.ready()
    await take_back(it, incarnation="an earlier process")
    await it.order(work_order(0, samples=1))
    await until(lambda: it.engine.sampled == HELD)
    await take_back(it)
    await until(lambda: told(it))
    await it.order(work_order(0, samples=1))
    await it.order(work_order(1, samples=1))
    await until(lambda: "d/1/0/0" in it.engine.asked)
    assert list(it.engine.asked) == ["d/1/0/0"]
    await it.order(work_order(0, samples=1, attempt=1))
    await until(lambda: len(it.engine.asked) == 2)


async def beats(it: WorkerHarness, count: int = 3) -> None:
    seen = len(it.heartbeats)
    await until(lambda: len(it.heartbeats) >= seen + count)


async def test_released_orders_are_kept_until_settled(make_worker: MakeWorker) -> None:
    """For hours, while a sample beside it is scored and behind that; and only up to the attempt that is settled."""
    skew = [0.0]
    it = make_worker(
        engine=engine(hold_at=HELD, chunk=7, unheld=frozenset({f"{GROUP}/1"})),
        settings=SETTINGS | {"fencing_timeout_s": 1e6},
        rewards=SlowScorer(),
        monotonic=lambda: time.monotonic() + skew[0],
    )
    await it.ready()
    await it.order(work_order(0, samples=3, attempt=1))
    await until(lambda: it.engine.sampled == LENGTH + 2 * HELD)
    await take_back(it, attempt=1)
    await until(lambda: told(it))
    first = it.heartbeats[-1]
    skew[0] = 7200.0
    await beats(it)
    it.rewards.may_answer.set()
    await until(lambda: len(it.trajectories) == 1)
    await take_back(it, attempt=0, is_settled=True)
    await beats(it)
    expected = (ReleasedOrder(group_id=GROUP, attempt=1, samples=((0, HELD), (2, HELD))),)
    assert (told(it), it.heartbeats[-1].partials_from) == (expected, first.partials_from)
    await take_back(it, attempt=1, is_settled=True)
    await until(lambda: not told(it))
    assert (it.heartbeats[-1].partials_from or 0) > (first.partials_from or 0)


@pytest.mark.parametrize("restarts", [False, True])
async def test_released_samples_are_continued_however_late(make_worker: MakeWorker, restarts: bool) -> None:
    """An hour later, when the sample beside it has been scored; by the dispatcher that asked or by its successor."""
    bus, skew, group = FailingBus(), [0.0], "toy/0/0"
    it = make_worker(
        bus=bus,
        engine=engine(hold_at=HELD, chunk=7, unheld=frozenset({f"{group}/1"})),
        settings=SETTINGS | {"fencing_timeout_s": 1e6},
        rewards=SlowScorer(),
        monotonic=lambda: time.monotonic() + skew[0],
    )
    loop = LoopSettings(
        groups_per_step=1, num_generations=3, max_staleness=0, max_completion_length=LENGTH, heartbeat_timeout_s=0.5
    )
    harness = DispatcherHarness(loop=loop, bus=bus)
    await harness.step(0)
    await harness.start()
    await it.ready()
    await until(lambda: it.engine.sampled == LENGTH + 2 * HELD)
    await take_back(it, group=group)
    await until(lambda: told(it))
    if restarts:
        await harness.end()
    skew[0] = 3600.0
    await beats(it)
    if restarts:
        await harness.start()
        await harness.settle()
    it.rewards.may_answer.set()
    it.engine.release.set()
    await until(lambda: len(it.trajectories) == 3)
    assert it.engine.sampled == 3 * LENGTH
    assert [(one.attempt, one.moves) for one in harness.orders()] == [(0, 0), (1, 1)]
    assert [len(one.parts) for one in it.trajectories] == [0, 2, 2]
    # Nothing of it is kept any more: not by the worker, and not on record.
    await until(lambda: not told(it) and not held_after_compaction(bus))
    await harness.end()


def record_of(message: WorkOrder | ReleaseOrder) -> Record:
    return Record("work-orders", 0, 0, None, encode(message), headers_of(message), 0.0)


@dataclass
class GatedEngine(FakeEngine):
    """Samples one token, then the last one once ``gate`` is open. ``is_asked``: it can be interrupted."""

    is_asked: bool = False
    gate: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        yield TokenDelta([1], [-0.5], V0)
        self.sampled += 1
        await self.gate
        yield TokenDelta([2], [-0.5], V0, FinishReason.STOP)

    def interrupt(self, request_id: str) -> bool:
        """Too late, whatever is said."""
        return self.is_asked


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_sample_that_ends_during_its_release_is_released_or_delivered(is_asked: bool) -> None:
    """The order that takes it back is read when the last token is there and its task has not had its turn yet."""
    bus = FailingBus(holds=lambda record: record.topic == "trajectories", writes_held=True)
    for topic in (TOPIC, "trajectories"):
        bus.create_topic(topic, 16)
    made, publisher = GatedEngine(is_asked=is_asked), await bus.publisher("test")
    status = WorkerStatus()
    pool = PartialPool(publisher, PartialReader(bus, TOPIC, "test"), TOPIC, WORKER, "a", 1, 1e6, status)
    rollout = Rollout(made, FakeTokenizer(), FakeScorer(), WORKER)
    releases = Releases(made, pool, status)
    executor = OrderExecutor(rollout, Outbox(publisher, 10), "trajectories", 1024, status, pool, releases)
    order = work_order(0, samples=1)
    taken = ReleaseOrder(worker_id=WORKER, incarnation="a", groups={GROUP: 0}, sent_at=0.0)
    async with asyncio.TaskGroup() as tasks:
        executor.accept(record_of(order), tasks)
        await until(lambda: made.sampled == 1)
        made.gate.set_result(None)
        executor.accept(record_of(taken), tasks)
        await asyncio.sleep(0.05)
        bus.release.set()
    delivered = len(bus.log("trajectories").partitions[order.partition])
    ((_, samples),) = [(one.attempt, one.samples) for one in status.released or ()]
    assert (delivered, [index for index, _ in samples]) == ((1, []) if is_asked else (0, [0]))


async def test_a_later_attempt_during_a_release_starts_after_it(make_worker: MakeWorker) -> None:
    """From a dispatcher that took the worker for lost meanwhile: its samples are not those that are leaving."""
    bus = FailingBus()
    it = make_worker(bus=bus, engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
    await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.sampled == 2 * HELD)
    bus.fail = lambda record: BusUnavailable("away") if record.topic == TOPIC else None
    await take_back(it)
    source = PartialSource(partition=partial_partition_of(WORKER), offset=it.heartbeats[-1].partials_from or 0)
    await it.order(work_order(0, samples=2, attempt=1, partials=(source,)))
    await it.order(work_order(1, samples=1))
    await until(lambda: "d/1/0/0" in it.engine.asked)
    bus.fail = lambda record: None
    it.engine.release.set()
    await until(lambda: len(it.trajectories) == 3)
    assert {(one.group_id, one.attempt) for one in it.trajectories} == {(GROUP, 1), ("d/1/0", 0)}
    assert it.engine.sampled == 3 * LENGTH


async def test_a_later_attempt_that_was_put_off_is_not_begun_by_a_worker_that_leaves(make_worker: MakeWorker) -> None:
    bus = FailingBus()
    it = make_worker(bus=bus, engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS | {"drain_grace_s": 5.0})
    running = await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.sampled == 2 * HELD)
    bus.fail = lambda record: BusUnavailable("away") if record.topic == TOPIC else None
    await take_back(it)
    await it.order(work_order(0, samples=2, attempt=1))
    await it.order(work_order(1, samples=1))
    await until(lambda: "d/1/0/0" in it.engine.asked)
    it.stop.set()
    await until(lambda: it.heartbeats[-1].state is WorkerState.DRAINING)
    bus.fail = lambda record: None
    await until(lambda: bool(it.heartbeats[-1].released))
    it.engine.release.set()
    await within(running, 5)
    assert it.engine.sampled == 2 * HELD + LENGTH
    assert {one.group_id for one in it.trajectories} == {"d/1/0"}


async def test_a_worker_that_leaves_meanwhile_leaves_what_it_has_on_record(make_worker: MakeWorker) -> None:
    it = make_worker(engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
    running = await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.sampled == 2 * HELD)
    await take_back(it)
    it.stop.set()
    await within(running, 5)
    assert [len(longest_prefix(chunks_on(it.bus), f"{GROUP}/{n}").token_ids) for n in range(2)] == [HELD] * 2
    assert it.trajectories == []
