import asyncio

from producers.generation.engines.port import TokenDelta
from producers.generation.rollout import MAX_PENDING, TokenStream
from schemas.errors import DeliveryUnknown
from schemas.identifiers import PolicyVersion
from schemas.trajectories import FinishReason, TokenChunk
from tests.fakes.publisher import FailingBus

DELTA = TokenDelta([1, 2], [-0.5, -0.25], PolicyVersion(1, 3), FinishReason.STOP)


async def test_a_delta_becomes_a_chunk_under_the_trajectory_id() -> None:
    bus = FailingBus()
    bus.create_topic("run.tokens", 4)
    await TokenStream(await bus.publisher("w"), "run.tokens", "w0").send("g/0", 5, DELTA)
    (record,) = [record for partition in bus.log("run.tokens").partitions for record in partition]
    expected = TokenChunk(
        trajectory_id="g/0",
        worker_id="w0",
        start=5,
        version=PolicyVersion(1, 3),
        token_ids=[1, 2],
        logprobs=[-0.5, -0.25],
        finish_reason=FinishReason.STOP,
    )
    assert record.key == "g/0"
    assert record.message() == expected


async def test_a_broker_that_fails_costs_chunks_and_nothing_else() -> None:
    bus = FailingBus(fail=lambda record: DeliveryUnknown("late"))
    stream = TokenStream(await bus.publisher("w"), "run.tokens", "w0")
    for _ in range(MAX_PENDING + 5):
        await stream.send("g/0", 0, DELTA)
    assert len(bus.attempts) == MAX_PENDING
    await asyncio.sleep(0)  # the broker's refusals arrive: there is room again
    await stream.send("g/0", 0, DELTA)
    assert len(bus.attempts) == MAX_PENDING + 1


async def test_a_closed_publisher_is_no_reason_to_stop_sampling() -> None:
    bus = FailingBus()
    publisher = await bus.publisher("w")
    await publisher.close()
    stream = TokenStream(publisher, "run.tokens", "w0")
    await stream.send("g/0", 0, DELTA)
    assert stream._pending == 0
