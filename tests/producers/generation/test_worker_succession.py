"""Two incarnations of one worker id among a real coordinator: restarts, zombies, and users' mistakes."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.memory import MemorySubscription
from streamrl.bus.port import TopicPartition
from streamrl.coordinator.coordinator import Coordinator
from streamrl.schemas.control import WorkerClaimed
from streamrl.schemas.errors import Superseded
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.topics import CONTROL
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.publisher import FailingBus
from tests.fakes.waiting import until
from tests.producers.generation.factories import work_order
from tests.producers.generation.worker_harness import RUN, V0, WorkerHarness, running_workers
from tests.progress import within


@asynccontextmanager
async def two_workers(tmp_path: Path, **changes: object) -> AsyncIterator[tuple[WorkerHarness, WorkerHarness]]:
    """One bus, one relay, a coordinator, and two workers of the same id that are not started yet."""
    stop = asyncio.Event()
    async with running_workers(tmp_path / "weights") as make:
        bus = FailingBus()
        first, second = (make(bus=bus, engine=FakeEngine(), **changes) for _ in range(2))
        second.cache = tmp_path / "other"
        await first.control(first.relay.add(V0))
        coordinator = asyncio.create_task(Coordinator(bus, RUN).run(stop))
        yield first, second
        for it in (first, second):
            it.stop.set()
            if it.running is not None:
                await asyncio.wait({it.running}, timeout=5)
        stop.set()
        await coordinator


def claims(worker: WorkerHarness) -> list[str]:
    return [message.incarnation for message in worker.read(CONTROL) if isinstance(message, WorkerClaimed)]


async def started(worker: WorkerHarness) -> "asyncio.Task[None]":
    known = len(claims(worker))
    running = worker.start()
    await until(lambda: len(claims(worker)) > known and worker.engine.version == V0)
    return running


async def test_one_incarnation_per_id_goes_on_the_newest_and_the_other_ends_superseded(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (first, second):
        former = await started(first)
        await started(second)
        with pytest.raises(Superseded, match="same id"):
            await within(former, 5)
        newest = claims(second)[-1]
        await second.order(work_order(0, samples=1))
        await until(lambda: second.trajectories)
        assert first.engine.requests == []
        assert first.engine.closed
        beats = first.heartbeats
        assert not [beat for beat in beats if beat.state is WorkerState.STOPPED]
        assert beats[-1].incarnation == newest


async def test_a_worker_that_is_superseded_with_completions_in_hand_publishes_none_of_them(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (first, second):
        first.engine.hold_at = 4
        former = await started(first)
        await first.order(work_order(0, samples=2))
        await until(lambda: first.engine.running == 2)
        await started(second)
        with pytest.raises(Superseded):
            await within(former, 5)
        first.engine.release.set()
        await asyncio.sleep(0.05)
        assert first.trajectories == []
        assert first.engine.left_early == 2


async def test_a_restarted_worker_takes_its_id_back_at_once(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (first, second):
        killed = await started(first)
        killed.cancel()
        await asyncio.wait({killed})
        running = await started(second)
        await until(lambda: second.state is WorkerState.READY)
        await second.order(work_order(0, samples=1))
        await until(lambda: second.trajectories)
        assert not running.done()


async def test_one_of_two_workers_started_at_the_same_time_stays(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (first, second):
        both = [first.start(), second.start()]
        done, pending = await asyncio.wait(both, timeout=8, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(pending)) == (1, 1)
        assert isinstance(done.pop().exception(), Superseded)
        await asyncio.sleep(0.1)
        assert not pending.pop().done()


@dataclass
class ReachableSubscription(MemorySubscription):
    """Answers where its end is only while the bus is reachable."""

    bus: "ReachableBus"

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        await self.bus.is_reachable.wait()
        return await super().end_offsets(partitions)


@dataclass
class ReachableBus(FailingBus):
    """``attempts`` lists whatever was handed to it."""

    is_reachable: asyncio.Event = field(default_factory=asyncio.Event)

    async def subscribe(self, *topics: Any, **how: Any) -> ReachableSubscription:
        found = await super().subscribe(*topics, **how)
        return ReachableSubscription(self, found.offsets, found.group_id)


@pytest.mark.parametrize("partial_trajectories", ["off", "stream", "durable"])
async def test_a_worker_that_was_suspended_hands_nothing_over_before_it_has_read_control(
    tmp_path: Path, partial_trajectories: str
) -> None:
    """Neither trajectories nor heartbeats nor tokens; and none at all once it has read that another has its id."""
    clock, bus = FakeClock(), ReachableBus()
    bus.is_reachable.set()
    async with running_workers(tmp_path / "weights") as make:
        settings = {"partial_trajectories": partial_trajectories}
        it = make(bus=bus, engine=FakeEngine(hold_at=4), settings=settings, monotonic=clock)
        worker = await it.ready()
        await it.order(work_order(0, samples=1))
        await until(lambda: it.engine.running == 1)
        await it.claim(it.heartbeats[-1].incarnation)
        await asyncio.sleep(0.05)
        bus.is_reachable.clear()
        clock.advance(60.0)
        handed_over = len(bus.attempts)
        it.engine.release.set()
        await asyncio.sleep(0.2)
        assert len(bus.attempts) == handed_over
        await it.claim("other")
        bus.is_reachable.set()
        with pytest.raises(Superseded):
            await within(worker, 5)
        assert len(bus.attempts) == handed_over
        assert it.trajectories == []
