import asyncio
from contextlib import suppress

from streamrl.producers.generation.heartbeat import Heartbeats
from streamrl.producers.generation.rollout import WorkerLoad
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.errors import DeliveryUnknown
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat, WorkerState
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.publisher import FailingBus
from tests.fakes.waiting import until


def sent(bus: FailingBus) -> list[Heartbeat]:
    messages = [record.message() for record in bus.log("hb").partitions[0]]
    return [message for message in messages if isinstance(message, Heartbeat)]


async def beating(bus: FailingBus, load: WorkerLoad, clock: FakeClock) -> Heartbeats:
    bus.create_topic("hb", 1)
    publisher, engine = await bus.publisher("w"), FakeEngine(max_num_seqs=4)
    return Heartbeats(publisher, "hb", "w0", "i", engine, engine.max_num_seqs, load, WorkerStatus(), clock)


async def test_a_heartbeat_says_what_the_worker_holds() -> None:
    bus, clock = FailingBus(), FakeClock()
    load = WorkerLoad(clock)
    heartbeats = await beating(bus, load, clock)
    await heartbeats.beat()
    load.generating, load.generated_tokens, load.finished_trajectories = 6, 500, 3
    clock.advance(2.0)
    await heartbeats.beat()
    first, second = sent(bus)
    assert (first.state, first.sequence, first.tokens_per_s) == (WorkerState.STARTING, 0, 0.0)
    assert (second.capacity, second.running, second.waiting) == (4, 4, 2)
    assert (second.generated_tokens, second.finished_trajectories, second.tokens_per_s) == (500, 3, 250.0)
    assert (second.sequence, second.sent_at) == (1, clock.now)
    assert first.incarnation == second.incarnation


async def test_the_rate_is_that_of_the_last_seconds_and_survives_a_clock_set_back() -> None:
    bus, monotonic, clock = FailingBus(), FakeClock(), FakeClock()
    load = WorkerLoad(monotonic)
    heartbeats = await beating(bus, load, clock)
    for tokens in [0] * 20 + [100] * 20:
        monotonic.advance(1.0)
        clock.advance(-60.0)
        load.generated_tokens += tokens
        await heartbeats.beat()
    assert 90 <= sent(bus)[-1].tokens_per_s <= 100
    clock.advance(-3600.0)
    monotonic.advance(1.0)
    await heartbeats.beat()
    assert 80 <= sent(bus)[-1].tokens_per_s <= 100


async def test_a_change_is_reported_at_once_and_failures_do_not_end_the_loop() -> None:
    failing = True
    bus = FailingBus(fail=lambda record: DeliveryUnknown("late") if failing else None)
    heartbeats = await beating(bus, WorkerLoad(), FakeClock())
    loop = asyncio.create_task(heartbeats.heartbeat_loop(60.0))
    heartbeats.status.set_state(WorkerState.READY)
    await until(lambda: len(bus.attempts) == 1)
    failing = False
    heartbeats.status.set_weights(PolicyVersion(1, 2), "")
    await until(lambda: sent(bus))
    heartbeats.status.set_weights(PolicyVersion(1, 2), "")
    await asyncio.sleep(0.02)
    loop.cancel()
    with suppress(asyncio.CancelledError):
        await loop
    (only,) = sent(bus)
    assert (only.state, only.version) == (WorkerState.READY, (1, 2))


async def test_the_orders_held_are_named_every_few_seconds_and_none_at_once() -> None:
    clock = FakeClock()
    bus, load = FailingBus(), WorkerLoad(clock)
    heartbeats = await beating(bus, load, clock)
    load.took("d/0/0/0")
    for _ in range(7):
        await heartbeats.beat()
        clock.advance(1.0)
    load.let_go("d/0/0/0")
    await heartbeats.beat()
    assert [one.orders for one in sent(bus)] == [{"d/0/0": 0.0}, None, None, None, None, {"d/0/0": 5.0}, None, {}]


def test_waiting_samples_progress_with_any_token_and_running_ones_with_their_own() -> None:
    clock = FakeClock()
    load = WorkerLoad(clock)
    for sample in ("runs/0/0", "runs/0/1", "waits/0/0"):
        load.took(sample)
    load.sampled("runs/0/0", 3)
    load.sampled("runs/0/1", 3)
    clock.advance(5.0)
    load.sampled("other/0/0", 3)
    clock.advance(2.0)
    assert load.held_orders() == {"runs/0": 7.0, "waits/0": 2.0}
    load.let_go("runs/0/0")
    assert load.held_orders()["runs/0"] == 0.0
    load.let_go("runs/0/1")
    assert list(load.held_orders()) == ["waits/0"]
    assert load.generated_tokens == 9
