"""What the dispatcher takes back is handed over up to its last token, and nobody samples or delivers it twice."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from bus.port import Outgoing
from producers.generation.partials import longest_prefix
from schemas.errors import BusUnavailable
from schemas.identifiers import partial_partition_of, partition_of_worker
from schemas.reports import ReleasedOrder
from schemas.topics import TRAJECTORIES, WORK_ORDERS
from schemas.trajectories import PartialSource, ReleaseOrder
from tests.fakes.publisher import FailingBus
from tests.fakes.waiting import until
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
from tests.producers.generation.test_worker import MakeStage, Stage, is_about, stages

GROUP, HELD = "d/0/0", 42
SETTINGS = DURABLE | {"partial_chunk_tokens": 256}
"""Nothing would be on record by itself before the hand-over."""


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[MakeStage]:
    async with stages(tmp_path / "weights") as make:
        yield make


async def take_back(it: Stage, *, attempt: int = 0, incarnation: str | None = None) -> None:
    message = ReleaseOrder(
        worker_id=WORKER,
        incarnation=incarnation or it.heartbeats[-1].incarnation,
        groups={GROUP: attempt},
        sent_at=0.0,
    )
    publisher = await super(FailingBus, it.bus).publisher("test")
    topic = WORK_ORDERS.full_name("r")
    await publisher.publish(Outgoing.of(topic, message, key=None, partition=partition_of_worker(WORKER)))


def told(it: Stage) -> tuple[ReleasedOrder, ...]:
    return it.heartbeats[-1].released or ()


async def test_what_is_let_go_is_on_record_first(stage: MakeStage) -> None:
    """While the pool's topic is away nothing is told; the one that goes on samples not a token again."""
    bus = FailingBus()
    it = stage(bus=bus, engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
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
        logprobs = np.float32([-0.5 - token / 128 for token in expected_tokens(trajectory)])
        assert trajectory.logprobs.tolist() == logprobs.tolist()
    await until(lambda: not held_after_compaction(bus))


async def test_one_worker_has_a_sample(stage: MakeStage) -> None:
    """What is whole when it is taken back is delivered here, the others are handed over."""
    bus = FailingBus()
    it = stage(bus=bus, engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
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


async def test_an_order_that_was_let_go_stays_so(stage: MakeStage) -> None:
    it = stage(engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
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


async def test_a_worker_that_leaves_meanwhile_leaves_what_it_has_on_record(stage: MakeStage) -> None:
    it = stage(engine=engine(hold_at=HELD, chunk=7), settings=SETTINGS)
    running = await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.sampled == 2 * HELD)
    await take_back(it)
    it.stop.set()
    await asyncio.wait_for(running, 5)
    assert [len(longest_prefix(chunks_on(it.bus), f"{GROUP}/{n}").token_ids) for n in range(2)] == [HELD] * 2
    assert it.trajectories == []
