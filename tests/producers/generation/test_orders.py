import asyncio

import structlog

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.producers.generation.outbox import Outbox
from streamrl.producers.generation.rollout import Rollout
from streamrl.producers.generation.status import WorkerStatus
from streamrl.producers.generation.worker import OrderExecutor
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Prompt, Trajectory
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.scorer import FakeScorer
from tests.producers.generation.factories import WORKER, work_order


def trajectories(bus: MemoryBus) -> list[list[Trajectory]]:
    """By partition."""
    messages = [[record.message() for record in records] for records in bus.log("trajectories").partitions]
    return [[message for message in found if isinstance(message, Trajectory)] for found in messages]


async def test_every_line_about_a_completion_names_its_trajectory() -> None:
    bus = MemoryBus()
    for topic in ("orders", "trajectories"):
        bus.create_topic(topic, 4)
    publisher, order = await bus.publisher(WORKER), work_order()
    await publisher.publish(Outgoing.of("orders", order, key=order.group_id))
    engine = FakeEngine(version=PolicyVersion(1, 0), started=True, failures={"d/0/0/0": 1, "d/0/0/1": 1})
    rollout = Rollout(engine, FakeTokenizer(), FakeScorer(), WORKER)
    orders = OrderExecutor(rollout, Outbox(publisher, 10), "trajectories", 1024, WorkerStatus())
    (record,) = await (await bus.subscribe(["orders"], client_id="w")).poll()
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with asyncio.TaskGroup() as tasks:
            orders.accept(record, tasks)
    assert {line["trajectory"] for line in logs} == {"d/0/0/0", "d/0/0/1"}
    assert "trajectory" not in structlog.contextvars.get_contextvars()


async def test_samples_of_one_group_go_where_their_order_says_whatever_their_lengths() -> None:
    bus = MemoryBus()
    for topic in ("orders", "trajectories"):
        bus.create_topic(topic, 8)
    publisher = await bus.publisher(WORKER)
    lengths = (1, 8, 40, 2000)
    for index in range(len(lengths)):
        order = work_order(samples=len(lengths), sample_indices=(index,))
        await publisher.publish(Outgoing.of("orders", order, key=order.group_id))
    engine = FakeEngine(version=PolicyVersion(1, 0), started=True)
    rollout = Rollout(engine, FakeTokenizer(), FakeScorer(), WORKER)
    executor = OrderExecutor(rollout, Outbox(publisher, 10), "trajectories", 1024, WorkerStatus())
    for record, length in zip(await (await bus.subscribe(["orders"], client_id="w")).poll(), lengths, strict=True):
        engine.length = length
        async with asyncio.TaskGroup() as tasks:
            executor.accept(record, tasks)
    messages = trajectories(bus)
    found = messages[work_order().partition]
    assert [len(trajectory.token_ids) for trajectory in found] == list(lengths)
    assert {trajectory.bucket for trajectory in found} == {work_order().estimate.bucket}
    assert sum(map(len, messages)) == len(lengths)


async def test_a_prompt_that_the_engine_refuses_harms_no_other_and_is_logged_less_and_less_often() -> None:
    """A model whose context is shorter than loop.max_prompt_length: the worker samples what it can."""
    bus = MemoryBus()
    for topic in ("orders", "trajectories"):
        bus.create_topic(topic, 4)
    publisher = await bus.publisher(WORKER)
    for number in range(100):
        prompt = Prompt(prompt_id=f"d/{number}", dataset="d", content="?" if number == 50 else "?" * 8)
        order = work_order(number, prompt=prompt)
        await publisher.publish(Outgoing.of("orders", order, key=order.group_id))
    engine = FakeEngine(version=PolicyVersion(1, 0), started=True, longest=7)
    orders = OrderExecutor(
        Rollout(engine, FakeTokenizer(), FakeScorer(), WORKER),
        Outbox(publisher, 10),
        "trajectories",
        1024,
        WorkerStatus(),
    )
    reading = await bus.subscribe(["orders"], client_id="w")
    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as tasks:
            for record in await reading.poll(max_records=200):
                orders.accept(record, tasks)
    found = [one for partition in trajectories(bus) for one in partition]
    assert len(found) == 200
    (sampled,) = {one.prompt_id for one in found if not one.refusal}
    assert sampled == "d/50"
    refused = next(one for one in found if one.prompt_id == "d/3")
    assert (refused.finish_reason, refused.refusal) == (FinishReason.ABORT, "longer than 7 tokens")
    assert set(refused.reward_errors.values()) == {"expected a prompt of 1 to 7 tokens, got 8"}
    assert not engine.running
    told = [line for line in logs if line["event"] == "prompt refused"]
    assert [line["refused"] for line in told] == [1, 2, 3, 4, 8, 16, 32, 64]
    assert not [line for line in logs if line["event"] == "request failed, trying it again"]
