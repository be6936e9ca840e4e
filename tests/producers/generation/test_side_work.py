"""How a worker calls side work of any kind, shown on one that only records the calls."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from streamrl.producers.generation.side_work import HostWorker
from streamrl.schemas.control import ArmShare, ArmWeights, PolicySplit
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import WorkerState
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until
from tests.producers.generation.factories import WORKER, work_order
from tests.producers.generation.worker_harness import V0, MakeWorker
from tests.progress import within


@dataclass
class NotedWork:
    """Records its calls, in order; is its own factory. Idle unless a test says otherwise."""

    reserved_slots: int = 1
    holds_up_leaving: bool = True
    calls: list[str] = field(default_factory=list)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    may_subscribe: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    hosts: list[HostWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.idle.set()
        self.may_subscribe.set()

    def build(self, host: HostWorker) -> "NotedWork":
        self.hosts.append(host)
        return self

    async def subscribe(self) -> None:
        self.calls.append("subscribe")
        await self.may_subscribe.wait()
        if self.error is not None:
            raise self.error

    async def begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        self.calls.append("begin")
        return [self.noted_loop()]

    async def noted_loop(self) -> None:
        self.calls.append("loop")
        try:
            await asyncio.Event().wait()
        finally:
            self.calls.append("loop cancelled")

    async def until_idle(self) -> None:
        await self.idle.wait()

    async def close(self) -> None:
        self.calls.append("close")


async def test_it_is_subscribed_before_the_first_heartbeat_and_begins_with_the_engine(make_worker: MakeWorker) -> None:
    noted = NotedWork()
    noted.may_subscribe.clear()
    it = make_worker(side_work=[noted], engine=FakeEngine(start_delay_s=0.1))
    running = it.start()
    await until(lambda: noted.calls == ["subscribe"])
    await asyncio.sleep(0.1)
    assert not it.heartbeats
    noted.may_subscribe.set()
    await until(lambda: it.heartbeats)
    assert noted.calls == ["subscribe"]
    await until(lambda: noted.calls[1:] == ["begin", "loop"])
    it.stop.set()
    await within(running, 5)
    assert noted.calls[3:] == ["loop cancelled", "close"]
    assert it.state is WorkerState.STOPPED


async def test_orders_get_no_slot_that_is_reserved_and_heartbeats_count_the_others(make_worker: MakeWorker) -> None:
    engine = FakeEngine(max_num_seqs=4, hold_at=4)
    it = make_worker(side_work=[NotedWork(1), NotedWork(0), NotedWork(1)], engine=engine)
    await it.ready()
    assert it.heartbeats[-1].capacity == 2
    await it.order(work_order(0, samples=3))
    await until(lambda: it.heartbeats[-1].running + it.heartbeats[-1].waiting == 3)
    assert (engine.running, it.heartbeats[-1].running, it.heartbeats[-1].waiting) == (2, 2, 1)
    engine.release.set()
    await until(lambda: len(it.trajectories) == 3)


@pytest.mark.parametrize("holds_up_leaving", [True, False])
async def test_a_worker_that_leaves_waits_only_for_what_holds_it_up(
    make_worker: MakeWorker, holds_up_leaving: bool
) -> None:
    noted = NotedWork(holds_up_leaving=holds_up_leaving)
    it = make_worker(side_work=[noted], settings={"drain_grace_s": 60})
    running = await it.ready()
    noted.idle.clear()
    it.stop.set()
    await until(lambda: it.state in (WorkerState.DRAINING, WorkerState.STOPPED))
    await asyncio.sleep(0.2)
    assert running.done() is not holds_up_leaving
    noted.idle.set()
    await within(running, 5)


async def test_weights_of_another_policy_wait_until_it_is_idle_and_the_host_says_so_before(
    make_worker: MakeWorker,
) -> None:
    noted = NotedWork()
    it = make_worker(side_work=[noted])
    await it.ready()
    status = noted.hosts[0].status
    assert (status.has_arm_weights, status.has_weights) == (False, True)
    noted.idle.clear()
    weights = it.relay.add(version := PolicyVersion(1, 7))
    await it.control(ArmWeights(**weights.model_dump(exclude={"kind", "promotion"}), policy="rloo"))
    arms = (ArmShare(policy="rloo", share=0.5),)
    await it.control(PolicySplit(sequence=9, sent_at=0.0, arms=arms, workers={WORKER: "rloo"}))
    await until(lambda: it.heartbeats[-1].awaits == version)
    await asyncio.sleep(0.2)
    assert (it.engine.version, status.policy, status.has_arm_weights) == (V0, "", True)
    noted.idle.set()
    await until(lambda: it.heartbeats[-1].policy == "rloo")
    assert (it.engine.version, status.awaits, status.has_arm_weights) == (version, None, True)


async def test_changes_of_side_work_are_sent_in_an_immediate_heartbeat(make_worker: MakeWorker) -> None:
    noted, now = NotedWork(), [100.0]
    it = make_worker(side_work=[noted], settings={"heartbeat_interval_s": 30}, monotonic=lambda: now[0])
    await it.ready()
    status = noted.hosts[0].status
    status.set_request_address("http://here")
    await until(lambda: it.heartbeats[-1].request_address == "http://here")
    status.decline("g", 2, until=110.0)
    await until(lambda: it.heartbeats[-1].declined == {"g": 2})
    now[0] = 110.0
    status.wake()
    await until(lambda: it.heartbeats[-1].declined == {})


async def test_one_that_cannot_subscribe_ends_the_worker_before_its_first_heartbeat(make_worker: MakeWorker) -> None:
    first, second = NotedWork(), NotedWork(error=RuntimeError("no such topic"))
    it = make_worker(side_work=[first, second])
    with pytest.raises(RuntimeError, match="no such topic"):
        await within(it.start(), 5)
    assert (first.calls, second.calls) == (["subscribe", "close"], ["subscribe", "close"])
    assert (it.heartbeats, it.engine.closed, it.rewards.closed) == ([], True, True)
