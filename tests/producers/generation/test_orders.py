import asyncio

import structlog

from bus.memory import MemoryBus
from bus.port import Outgoing
from producers.generation.outbox import Outbox
from producers.generation.rollout import Rollout
from producers.generation.worker import OrderExecutor
from schemas.identifiers import PolicyVersion
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.scorer import FakeScorer
from tests.producers.generation.factories import WORKER, work_order


async def test_every_line_about_a_completion_names_its_trajectory() -> None:
    bus = MemoryBus()
    for topic in ("orders", "trajectories"):
        bus.create_topic(topic, 4)
    publisher, order = await bus.publisher(WORKER), work_order()
    await publisher.publish(Outgoing.of("orders", order, key=order.group_id))
    engine = FakeEngine(version=PolicyVersion(1, 0), started=True, failures={"d/0/0/0": 1, "d/0/0/1": 1})
    rollout = Rollout(engine, FakeTokenizer(), FakeScorer(), WORKER)
    orders = OrderExecutor(rollout, Outbox(publisher, 10), "trajectories", 1024)
    (record,) = await (await bus.subscribe(["orders"], client_id="w")).poll()
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with asyncio.TaskGroup() as tasks:
            orders.accept(record, tasks)
    assert {line["trajectory"] for line in logs} == {"d/0/0/0", "d/0/0/1"}
    assert "trajectory" not in structlog.contextvars.get_contextvars()
