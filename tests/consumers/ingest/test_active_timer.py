from bus.memory import MemoryBus, MemorySubscription
from bus.port import TopicPartition
from consumers.ingest.groups import MAX_GAP_S, PROBE_AFTER_S, ActiveTimer
from schemas.errors import BusUnavailable
from tests.fakes.clock import FakeClock


class Flaky(MemorySubscription):
    """Answers only while its broker is there."""

    there = True

    async def end_offsets(self) -> dict[TopicPartition, int]:
        if not self.there:
            raise BusUnavailable("nobody answers")
        return {}


async def test_silence_counts_only_while_the_broker_is_there() -> None:
    clock, subscription = FakeClock(), Flaky(MemoryBus(), {}, None)
    timer = ActiveTimer(clock)
    clock.advance(PROBE_AFTER_S)
    await timer.advance(subscription, 0, drained=True)
    assert timer.elapsed_s == PROBE_AFTER_S
    subscription.there = False
    clock.advance(3.0)
    await timer.advance(subscription, 0, drained=True)
    subscription.there = True
    clock.advance(0.5)
    await timer.advance(subscription, 4, drained=True)
    assert timer.elapsed_s == PROBE_AFTER_S + 0.5


async def test_time_in_which_this_process_stood_still_or_was_behind_does_not_count() -> None:
    clock, subscription = FakeClock(), Flaky(MemoryBus(), {}, None)
    timer = ActiveTimer(clock)
    clock.advance(100.0)
    await timer.advance(subscription, 1, drained=True)
    assert timer.elapsed_s == MAX_GAP_S
    clock.advance(1.0)
    await timer.advance(subscription, 500, drained=False)
    assert timer.elapsed_s == MAX_GAP_S
