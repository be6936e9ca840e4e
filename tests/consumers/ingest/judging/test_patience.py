from bus.memory import MemoryBus, MemorySubscription
from bus.port import TopicPartition
from consumers.ingest.groups import ASK_S, STALL_S, Patience
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
    patience = Patience(clock)
    clock.advance(ASK_S)
    await patience.listen(subscription, 0, caught_up=True)
    assert patience.listened_s == ASK_S
    subscription.there = False
    clock.advance(3.0)
    await patience.listen(subscription, 0, caught_up=True)
    subscription.there = True
    clock.advance(0.5)
    await patience.listen(subscription, 4, caught_up=True)
    assert patience.listened_s == ASK_S + 0.5


async def test_time_in_which_this_process_stood_still_or_was_behind_does_not_count() -> None:
    clock, subscription = FakeClock(), Flaky(MemoryBus(), {}, None)
    patience = Patience(clock)
    clock.advance(100.0)
    await patience.listen(subscription, 1, caught_up=True)
    assert patience.listened_s == STALL_S
    clock.advance(1.0)
    await patience.listen(subscription, 500, caught_up=False)
    assert patience.listened_s == STALL_S
