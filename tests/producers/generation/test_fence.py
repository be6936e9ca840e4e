import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.producers.generation.control import ControlFollower
from streamrl.producers.generation.outbox import Fence, FencedPublisher
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.control import WorkerClaimed, control_key
from streamrl.schemas.errors import BusUnavailable, Superseded
from streamrl.weights.adopt import WeightsAdopter
from streamrl.weights.fetch import WeightsFetcher
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until
from tests.progress import within


def fence(clock: Callable[[], float] = lambda: 0.0) -> Fence:
    return Fence("w0", "mine", 5.0, clock)


def test_a_claim_of_another_after_our_own_ends_us() -> None:
    it = fence()
    it.claimed("mine")
    with pytest.raises(Superseded, match="superseded by incarnation other"):
        it.claimed("other")


def test_a_claim_that_our_first_heartbeat_overtook_does_not_end_us() -> None:
    it = fence()
    it.claimed("earlier")
    it.claimed("mine")
    assert it.superseded is None


def test_a_claim_that_is_repeated_ends_us_though_we_never_heard_our_own() -> None:
    it = fence()
    it.claimed("other")
    with pytest.raises(Superseded):
        it.claimed("other")


@dataclass
class Sluggish(MemorySubscription):
    """A subscription whose end cannot be asked for at first."""

    refusals: int = 2

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        if self.refusals and self.offsets[TopicPartition("control", 0)]:
            self.refusals -= 1
            raise BusUnavailable("gone")
        return await super().end_offsets(partitions)


async def never_waited_for() -> None:
    raise AssertionError("nothing is adopted here")


@dataclass
class FenceHarness:
    bus: MemoryBus
    clock: FakeClock
    publisher: FencedPublisher
    control: ControlFollower

    @classmethod
    async def open(cls, tmp_path: object) -> "FenceHarness":
        bus, clock = MemoryBus(), FakeClock()
        for topic in ("control", "out"):
            bus.create_topic(topic, 1)
        barrier = fence(clock)
        status = WorkerStatus()
        adopter = WeightsAdopter(FakeEngine(), WeightsFetcher(tmp_path), status, never_waited_for)  # type: ignore[arg-type]
        subscription = Sluggish(bus, {TopicPartition("control", 0): 0}, None)
        publisher = FencedPublisher(await bus.publisher("w"), barrier)
        return cls(bus, clock, publisher, ControlFollower(subscription, barrier, adopter, status))

    async def claim(self, incarnation: str) -> None:
        claim = WorkerClaimed(sequence=0, sent_at=0.0, worker_id="w0", incarnation=incarnation)
        await (await self.bus.publisher("c")).publish(Outgoing.of("control", claim, key=control_key(claim)))

    @property
    def published(self) -> int:
        return len(self.bus.log("out").partitions[0])


RECORD = Outgoing("out", b"x", "k")


async def test_a_zombie_publishes_nothing(tmp_path: object) -> None:
    """It stands still; another claims its id meanwhile; it goes on with a record in its hand."""
    harness = await FenceHarness.open(tmp_path)
    following = asyncio.create_task(harness.control.control_loop())
    await harness.claim("mine")
    await harness.publisher.publish(RECORD)
    await asyncio.sleep(0.02)
    harness.clock.advance(6.0)
    sending = [asyncio.create_task(harness.publisher.publish(RECORD)) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert harness.published == 1
    await harness.claim("other")
    for task in (following, *sending):
        with pytest.raises(Superseded):
            await within(task, 5)
    with pytest.raises(Superseded):
        await harness.publisher.submit(RECORD)
    assert harness.published == 1


async def test_a_process_that_was_only_suspended_goes_on_after_a_look_at_control(tmp_path: object) -> None:
    harness = await FenceHarness.open(tmp_path)
    following = asyncio.create_task(harness.control.control_loop())
    await harness.claim("mine")
    await asyncio.sleep(0.02)
    harness.clock.advance(6.0)
    sending = asyncio.create_task(harness.publisher.publish(RECORD))
    await asyncio.sleep(0.02)
    assert not sending.done()
    await until(lambda: harness.published == 1)
    assert harness.control.fence.superseded is None
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
