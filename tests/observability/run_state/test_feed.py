import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from bus.kafka.connection import BrokerAvailability
from bus.memory import MemoryBus
from bus.port import Bus, Outgoing, Publisher, Subscription, TopicPartition, TransactionalPublisher
from observability.run_state.feed import COUNTED, RECENT, WHOLE_RUN, RunFeed, lag_of_committed
from observability.run_state.state import RunState
from schemas.errors import BusUnavailable
from schemas.identifiers import PolicyVersion
from schemas.topics import WORK_ORDERS
from tests.observability.run_state.made_up_run import SHARDS, MadeUpRun
from tests.observability.run_state.writing import append, topics_of
from tests.schemas.examples import examples

RUN = "made-up"


@dataclass
class Asked:
    """A bus that remembers which topics were subscribed to."""

    bus: Bus
    topics: list[str] = field(default_factory=list)

    async def publisher(self, client_id: str) -> Publisher:
        return await self.bus.publisher(client_id)

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        return await self.bus.transactional(transactional_id)

    async def subscribe(self, topics: Iterable[str], **how: Any) -> Subscription:
        self.topics += topics
        return await self.bus.subscribe(topics, **how)


@dataclass
class Committed:
    """Offsets that somebody committed."""

    answer: Callable[[], Mapping[TopicPartition, int]]
    asked: int = 0
    closed: bool = False

    async def ask(self) -> Mapping[TopicPartition, int]:
        self.asked += 1
        return self.answer()

    async def close(self) -> None:
        self.closed = True


def a_past(seconds: float) -> tuple[MemoryBus, MadeUpRun]:
    bus, made_up = topics_of(RUN), MadeUpRun(time.time() - seconds)
    for happening in made_up.happenings():
        if happening.at > time.time():
            break
        append(bus, RUN, happening)
    return bus, made_up


async def test_the_recent_past_is_read_in_the_order_of_its_times_and_then_what_comes() -> None:
    bus, made_up = a_past(20.0)
    state, stop = RunState(RUN), asyncio.Event()
    task = asyncio.create_task(RunFeed(bus, state).run(stop))
    async with asyncio.timeout(10):
        while state.step < made_up.version:
            await asyncio.sleep(0.02)
        assert sum(state.staleness.counts.values()) == 64 * made_up.version
        seen, publisher = state.announced, await bus.publisher("test")
        changed = examples()["control-weights-ready"].replace(version=PolicyVersion(1, 999))
        await publisher.publish(Outgoing.of(f"{RUN}.control", changed, key="weights/policy"))
        while state.announced == seen:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert state.announced.number == 999
    assert bus.committed == {}


async def test_what_comes_is_read_from_the_bus_without_prefetch() -> None:
    bus, made_up = a_past(5.0)
    calm = Asked(bus)
    state, stop = RunState(RUN), asyncio.Event()
    task = asyncio.create_task(RunFeed(bus, state, without_prefetch=calm).run(stop))
    async with asyncio.timeout(10):
        while not calm.topics or state.step < made_up.version:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert calm.topics == sorted(topic.full_name(RUN) for topic in {*RECENT, *COUNTED})


async def test_a_topic_that_was_made_anew_is_followed_from_where_it_is() -> None:
    bus, _ = a_past(5.0)
    control = TopicPartition(f"{RUN}.control", 0)
    state, stop = RunState(RUN), asyncio.Event()
    ends = {TopicPartition(topic.full_name(RUN), 0): 0 for topic in {*RECENT, *COUNTED}}
    feed = RunFeed(bus, state, positions=ends | {control: 1_000_000})
    task = asyncio.create_task(feed.run(stop))
    publisher = await bus.publisher("test")
    async with asyncio.timeout(10):
        while feed.positions[control] > 1000:
            await asyncio.sleep(0.02)
        changed = examples()["control-weights-ready"].replace(version=PolicyVersion(1, 999))
        await publisher.publish(Outgoing.of(f"{RUN}.control", changed, key="weights/policy"))
        while state.announced.number != 999:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)


async def test_lag_is_what_the_trainer_has_not_finished() -> None:
    bus, _ = a_past(5.0)
    state, stop = RunState(RUN), asyncio.Event()

    committed = Committed(lambda: {TopicPartition(f"{RUN}.trajectories", 0): 2})
    task = asyncio.create_task(RunFeed(bus, state, SHARDS, committed).run(stop))
    async with asyncio.timeout(10):
        while not state.committed_lag:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)
    logs = bus.log(f"{RUN}.trajectories").partitions
    assert state.committed_lag[0] == len(logs[0]) + len(logs[1]) - 2
    assert sum(state.committed_lag.values()) == sum(map(len, logs)) - 2
    assert committed.closed


async def test_an_outage_is_told_once_however_often_the_broker_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.run_state.feed.ENDS_EVERY_S", 0.01)
    bus, _ = a_past(5.0)
    state, stop = RunState(RUN), asyncio.Event()

    def silent_at_first() -> Mapping[TopicPartition, int]:
        if committed.asked <= 5:
            raise BusUnavailable("no answer")
        return {}

    committed = Committed(silent_at_first)
    feed = RunFeed(
        bus, state, SHARDS, committed, availability=BrokerAvailability("b:1", "start it again"), pace_s=lambda: 0.01
    )
    with capture_logs() as logs:
        task = asyncio.create_task(feed.run(stop))
        async with asyncio.timeout(10):
            while committed.asked < 10:
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.wait_for(task, 5)
    assert [each["event"] for each in logs] == [
        "the broker at b:1 does not answer; start it again",
        "the broker at b:1 answers again",
    ]


async def test_orders_are_counted_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.run_state.feed.ENDS_EVERY_S", 0.01)
    bus, made_up = a_past(5.0)
    state, stop = RunState(RUN), asyncio.Event()
    feed = RunFeed(bus, state, pace_s=lambda: 0.01)
    task = asyncio.create_task(feed.run(stop))
    async with asyncio.timeout(10):
        while state.step < made_up.version:
            await asyncio.sleep(0.02)
        for each in [each for each in itertools.islice(made_up.happenings(), 400) if each.topic is WORK_ORDERS][:7]:
            append(bus, RUN, each)
        while state.rates["orders"].total < 7:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)
    topic = WORK_ORDERS.full_name(RUN)
    ends = {TopicPartition(topic, lane): len(held) for lane, held in enumerate(bus.log(topic).partitions)}
    assert {tp: at for tp, at in feed.positions.items() if tp.topic == topic} == ends
    assert state.rates["orders"].total == 7


async def test_a_whole_run_is_read_to_its_end_without_its_trajectories() -> None:
    bus, made_up = a_past(20.0)
    state, stop = RunState(RUN), asyncio.Event()
    committed = Committed(lambda: {TopicPartition(f"{RUN}.trajectories", 0): 2})
    feed = RunFeed(bus, state, SHARDS, committed, pace_s=lambda: 0.01, past=WHOLE_RUN)
    task = asyncio.create_task(feed.run(stop))
    async with asyncio.timeout(10):
        while state.step < made_up.version:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)
    late = examples()["step-report"].replace(step=999, version=PolicyVersion(1, 999), finished=True)
    await (await bus.publisher("test")).publish(Outgoing.of(f"{RUN}.steps", late, key="grpo"))
    await feed.read_to_end()
    assert state.finished
    assert [entry.step for entry in state.steps.entries] == [*range(1, made_up.version + 1), 999]
    assert not state.last, "trajectories are counted by their ends"
    assert sum(state.lag.values()) == sum(map(len, bus.log(f"{RUN}.trajectories").partitions)) - 2
    assert committed.closed


async def test_a_run_that_ended_at_once_is_read_whole() -> None:
    bus, made_up = a_past(20.0)
    state = RunState(RUN)
    await RunFeed(bus, state, past=WHOLE_RUN).read_to_end()
    assert len(state.steps.entries) == made_up.version


def test_lag_counts_this_topic_only() -> None:
    ends = {TopicPartition("a.trajectories", 0): 5, TopicPartition("a.trajectories", 3): 7, TopicPartition("a.x", 0): 9}
    finished = {TopicPartition("a.trajectories", 3): 8}
    assert lag_of_committed("a.trajectories", ends, finished, 2) == {0: 5, 1: 0}
