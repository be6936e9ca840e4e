import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamrl.bus.kafka.connection import BrokerAvailability
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import (
    Bus,
    GroupMember,
    Outgoing,
    Publisher,
    Subscription,
    TopicPartition,
    TransactionalPublisher,
)
from streamrl.observability.run_state.feed import COUNTED, RECENT, WHOLE_RUN, RunFeed, ends_by_bucket
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import TRAJECTORIES
from tests.observability.run_state.made_up_run import SHARDS, MadeUpRun
from tests.observability.run_state.writing import append, append_raw, topics_of
from tests.progress import patience, within
from tests.schemas.examples import examples

RUN = "made-up"


@dataclass
class Asked:
    """A bus that remembers which topics were subscribed to."""

    bus: Bus
    topics: list[str] = field(default_factory=list)

    async def publisher(self, client_id: str) -> Publisher:
        return await self.bus.publisher(client_id)

    async def join(self, topic: str, *, group_id: str, client_id: str) -> GroupMember:
        return await self.bus.join(topic, group_id=group_id, client_id=client_id)

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        return await self.bus.group_offsets(topic, group_id=group_id)

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        return await self.bus.transactional(transactional_id)

    async def subscribe(self, topics: Iterable[str], **how: Any) -> Subscription:
        self.topics += topics
        return await self.bus.subscribe(topics, **how)


@dataclass
class SilentEnds(Asked):
    """A bus that does not tell the ends of topics the first times."""

    times: int = 0

    async def subscribe(self, topics: Iterable[str], **how: Any) -> Subscription:
        subscription = await self.bus.subscribe(topics, **how)
        told = subscription.end_offsets

        async def ends(partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
            self.times += 1
            if self.times <= 5:
                raise BusUnavailable("no answer")
            return await told(partitions)

        subscription.end_offsets = ends  # type: ignore[method-assign]
        return subscription


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
    async with patience(10):
        while state.progress.step < made_up.version:
            await asyncio.sleep(0.02)
        assert sum(state.trajectories.staleness.counts.values()) == 64 * made_up.version
        seen, publisher = state.progress.announced, await bus.publisher("test")
        changed = examples()["control-weights-ready"].replace(version=PolicyVersion(1, 999))
        await publisher.publish(Outgoing.of(f"{RUN}.control", changed, key="weights/policy"))
        while state.progress.announced == seen:
            await asyncio.sleep(0.02)
    stop.set()
    await within(task, 5)
    assert state.progress.announced.number == 999
    assert bus.committed == {}


async def test_the_recent_past_begins_where_all_partitions_are_whole() -> None:
    """Of a length bucket that is hardly filled any more the last records are of long ago."""
    bus, state = topics_of(RUN), RunState(RUN)
    record = Outgoing.of(TRAJECTORIES.full_name(RUN), examples()["trajectory"], key="group")
    for partition, times in enumerate([(1.0, 2.0, 3.0), tuple(map(float, range(1, 10))), (5.0, 9.5)]):
        for at in times:
            append_raw(bus, record, partition, at)
    partitions = len(bus.log(record.topic).partitions)
    await RunFeed(bus, state, past={TRAJECTORIES: 2 * partitions}).read_to_end()
    assert set(state.trajectories.fates.oldest_version) == {(1, 7), (1, 8), (2, 1)}


async def test_new_records_are_read_without_prefetch() -> None:
    bus, made_up = a_past(5.0)
    calm = Asked(bus)
    state, stop = RunState(RUN), asyncio.Event()
    task = asyncio.create_task(RunFeed(bus, state, without_prefetch=calm).run(stop))
    async with patience(10):
        while not calm.topics or state.progress.step < made_up.version:
            await asyncio.sleep(0.02)
    stop.set()
    await within(task, 5)
    assert calm.topics == sorted(topic.full_name(RUN) for topic in {*RECENT, *COUNTED})


async def test_a_recreated_topic_is_followed_from_its_present_position() -> None:
    bus, _ = a_past(5.0)
    control = TopicPartition(f"{RUN}.control", 0)
    state, stop = RunState(RUN), asyncio.Event()
    ends = {TopicPartition(topic.full_name(RUN), 0): 0 for topic in {*RECENT, *COUNTED}}
    feed = RunFeed(bus, state, positions=ends | {control: 1_000_000})
    task = asyncio.create_task(feed.run(stop))
    publisher = await bus.publisher("test")
    async with patience(10):
        while feed.positions[control] > 1000:
            await asyncio.sleep(0.02)
        changed = examples()["control-weights-ready"].replace(version=PolicyVersion(1, 999))
        await publisher.publish(Outgoing.of(f"{RUN}.control", changed, key="weights/policy"))
        while state.progress.announced.number != 999:
            await asyncio.sleep(0.02)
    stop.set()
    await within(task, 5)


async def test_lag_counts_unfinished_trajectories_and_those_after_the_last_step() -> None:
    bus, made_up = a_past(5.0)
    state, stop = RunState(RUN), asyncio.Event()
    task = asyncio.create_task(RunFeed(bus, state, SHARDS, pace_s=lambda: 0.01).run(stop))

    def unfinished() -> int:
        return sum(map(len, bus.log(f"{RUN}.trajectories").partitions)) - sum(made_up.finished)

    async with patience(10):
        while state.progress.step < made_up.version or sum(state.lag.values()) < unfinished():
            await asyncio.sleep(0.02)
        await (await bus.publisher("test")).publish(bus_record(bus))
        while sum(state.lag.values()) < unfinished():
            await asyncio.sleep(0.02)
    stop.set()
    await within(task, 5)
    assert sum(state.lag.values()) == unfinished()


def bus_record(bus: MemoryBus) -> Outgoing:
    """A trajectory once more."""
    held = next(record for partition in bus.log(f"{RUN}.trajectories").partitions for record in partition)
    return Outgoing(held.topic, held.value, held.key, held.partition, held.headers)


async def test_an_outage_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.observability.run_state.feed.ENDS_EVERY_S", 0.01)
    bus, _ = a_past(5.0)
    state, stop = RunState(RUN), asyncio.Event()
    silent = SilentEnds(bus)
    availability = BrokerAvailability("b:1", "start it again")
    feed = RunFeed(bus, state, SHARDS, availability=availability, without_prefetch=silent, pace_s=lambda: 0.01)
    with capture_logs() as logs:
        task = asyncio.create_task(feed.run(stop))
        async with patience(10):
            while silent.times < 10:
                await asyncio.sleep(0.02)
        stop.set()
        await within(task, 5)
    assert [each["event"] for each in logs] == [
        "the broker at b:1 does not answer; start it again",
        "the broker at b:1 answers again",
    ]


async def test_a_whole_run_is_read_to_its_end_without_its_trajectories() -> None:
    bus, made_up = a_past(20.0)
    state, stop = RunState(RUN), asyncio.Event()
    feed = RunFeed(bus, state, SHARDS, pace_s=lambda: 0.01, past=WHOLE_RUN)
    task = asyncio.create_task(feed.run(stop))
    async with patience(10):
        while state.progress.step < made_up.version:
            await asyncio.sleep(0.02)
    stop.set()
    await within(task, 5)
    late = examples()["step-report"].replace(step=999, version=PolicyVersion(1, 999), finished=True)
    await (await bus.publisher("test")).publish(Outgoing.of(f"{RUN}.steps", late, key="grpo"))
    await feed.read_to_end()
    assert state.progress.finished
    assert [entry.step for entry in state.learning.steps.entries] == [*range(1, made_up.version + 1), 999]
    assert not state.trajectories.last, "trajectories are counted by their ends"
    assert sum(state.trajectories.ends.values()) == sum(map(len, bus.log(f"{RUN}.trajectories").partitions))


async def test_a_run_that_ended_at_once_is_read_whole() -> None:
    bus, made_up = a_past(20.0)
    state = RunState(RUN)
    await RunFeed(bus, state, past=WHOLE_RUN).read_to_end()
    assert len(state.learning.steps.entries) == made_up.version


def test_ends_are_summed_up_by_bucket() -> None:
    ends = {TopicPartition("a.trajectories", number): end for number, end in enumerate((5, 7, 0, 2))}
    assert ends_by_bucket(ends, 2) == {0: 12, 1: 2}
