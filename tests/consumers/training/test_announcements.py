import asyncio
from collections.abc import Mapping, Sequence

import pytest

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.consumers.training.announcer import Announcements, StepAnnouncer
from streamrl.schemas.errors import BusError
from tests.progress import within


class SlowAnnouncer(StepAnnouncer):
    """Announces when it is let go; fails if it was told to."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.error: BusError | None = None
        self.keys: list[str | None] = []
        self.closed = False

    async def announce(self, records: Sequence[Outgoing], offsets: Mapping[TopicPartition, int]) -> None:
        await self.let_go.wait()
        if self.error is not None:
            raise self.error
        self.keys += [record.key for record in records]

    async def close(self) -> None:
        self.closed = True


async def post(announcements: Announcements, key: str, made: asyncio.Event | None = None) -> None:
    async def make() -> list[Outgoing]:
        if made is not None:
            await made.wait()
        return [Outgoing("t", None, key)]

    await announcements.post(make, {})


async def test_the_trainer_goes_on_while_an_announcement_is_under_way_and_their_order_never_changes() -> None:
    announcer, done = SlowAnnouncer(), []
    announcements = Announcements(announcer, lambda: done.append(len(announcer.keys)))
    await within(post(announcements, "first"), 1)
    second = asyncio.create_task(post(announcements, "second"))
    await asyncio.sleep(0.01)
    assert (announcer.keys, second.done()) == ([], False)
    announcer.let_go.set()
    await second
    await announcements.settled()
    assert (announcer.keys, done) == (["first", "second"], [1, 2])


@pytest.mark.parametrize("act", ["settled", "post"])
async def test_a_failed_announcement_is_raised_at_the_next_act(act: str) -> None:
    announcer = SlowAnnouncer()
    announcer.error = BusError("too large")
    announcer.let_go.set()
    announcements = Announcements(announcer, lambda: None)
    await post(announcements, "first")
    with pytest.raises(BusError, match="too large"):
        await (announcements.settled() if act == "settled" else post(announcements, "second"))
    assert announcements.under_way is None


async def test_a_version_is_written_after_the_announcement_before_and_its_writing_can_be_awaited() -> None:
    announcer, made = SlowAnnouncer(), asyncio.Event()
    announcements = Announcements(announcer, lambda: None)
    await announcements.made()  # nothing is under way
    await post(announcements, "first", made)
    waiting = asyncio.create_task(announcements.made())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    made.set()
    await within(waiting, 1)
    assert announcements.under_way is not None, "made, and not announced yet"
    announcer.let_go.set()
    await announcements.settled()
    assert announcer.keys == ["first"]


async def test_a_failed_announcement_is_raised_to_its_waiters() -> None:
    async def fail() -> list[Outgoing]:
        raise BusError("no room")

    announcements = Announcements(SlowAnnouncer(), lambda: None)
    await announcements.post(fail, {})
    with pytest.raises(BusError, match="no room"):
        await announcements.made()


async def test_closing_gives_up_what_is_under_way() -> None:
    announcer = SlowAnnouncer()
    announcements = Announcements(announcer, lambda: None)
    await post(announcements, "first")
    await within(announcements.close(), 1)
    assert (announcer.keys, announcer.closed) == ([], True)


async def test_closing_that_is_cancelled_waits_for_what_is_under_way_and_closes_the_announcer() -> None:
    made, announcer = asyncio.Event(), SlowAnnouncer()
    announcements = Announcements(announcer, lambda: None)

    async def make() -> list[Outgoing]:
        try:
            await asyncio.Event().wait()
        finally:
            await made.wait()
        return []

    await announcements.post(make, {})
    under_way = announcements.under_way
    assert under_way is not None
    closing = asyncio.create_task(announcements.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    await asyncio.sleep(0.01)
    assert not closing.done()
    made.set()
    await asyncio.wait({closing}, timeout=1)
    assert closing.cancelled()
    assert (under_way.done(), announcer.closed) == (True, True)
