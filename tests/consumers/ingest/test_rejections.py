import asyncio

import pytest

from streamrl.bus.port import Outgoing, Position
from streamrl.consumers.ingest.rejections import ATTEMPTS, RejectionWriter, SkipTally
from streamrl.schemas.errors import BusError, DeliveryUnknown
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord
from streamrl.schemas.topics import SKIPS
from tests.fakes.publisher import FailingBus, FailingPublisher
from tests.fakes.topics import create_topics, messages_of
from tests.progress import within


def unreliable(*answers: BusError | None) -> FailingBus:
    """Answers the first records as it is told, in order; later ones arrive."""
    left = list(answers)
    return create_topics(FailingBus(fail=lambda record: left.pop(0) if left else None), "r")


def arrived(bus: FailingBus) -> list[SkipRecord]:
    return messages_of(bus, "r", SKIPS, SkipRecord)


async def skip_one(rejections: RejectionWriter, detail: str = "d") -> None:
    rejections.skip(RecordRef("d/0/0/0", 0, 5), "d/0/0", SkipReason.STALE, detail, 3)
    await rejections.send()


def rejects_on(bus: FailingBus, kind: type[FailingPublisher] = FailingPublisher) -> RejectionWriter:
    return RejectionWriter("r", "grpo", lambda: 0.0, SkipTally(3), kind(bus, "reader"))


async def test_no_row_is_lost() -> None:
    bus = unreliable(DeliveryUnknown("late"), None, DeliveryUnknown("late"))
    rejections = rejects_on(bus)
    await skip_one(rejections, "first")
    await skip_one(rejections, "second")
    await rejections.flush()
    assert len(arrived(bus)) == 2
    assert len(bus.attempts) == 4
    assert rejections.tally.reasons == {"stale": 2}


async def test_a_row_that_failed_long_before_does_not_count_as_sent() -> None:
    bus = unreliable(DeliveryUnknown("late"))
    rejections = rejects_on(bus)
    await skip_one(rejections)
    await asyncio.sleep(0.01)
    assert arrived(bus) == []
    await rejections.flush()
    assert len(arrived(bus)) == 1


async def test_a_broker_that_never_answers_is_not_asked_for_ever() -> None:
    bus = unreliable(*(DeliveryUnknown("late") for _ in range(100)))
    rejections = rejects_on(bus)
    await skip_one(rejections)
    with pytest.raises(DeliveryUnknown, match="a checkpoint needs these rows"):
        await rejections.flush()
    assert len(bus.attempts) == ATTEMPTS


async def test_a_refused_row_is_an_error() -> None:
    rejections = rejects_on(unreliable(BusError("too large")))
    await skip_one(rejections)
    with pytest.raises(BusError, match="too large"):
        await rejections.flush()
    with pytest.raises(BusError, match="too large"):
        await rejections.send()


async def test_long_or_broken_text_is_cut_and_mended() -> None:
    bus = unreliable()
    rejections = rejects_on(bus)
    rejections.skip(RecordRef("", 0, 5), "k" * 999, SkipReason.POISON, "\ud800" * 5000, 3)
    await rejections.flush()
    assert len(arrived(bus)) == 1


class FullPublisher(FailingPublisher):
    """Has no buffer space from the second record on, until its bus is released."""

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        if self.bus.attempts:
            await self.bus.release.wait()
        return await super().submit(record)


async def test_flushing_waits_for_a_row_that_another_task_is_sending_again() -> None:
    bus = unreliable(DeliveryUnknown("late"))
    rejections = rejects_on(bus, FullPublisher)
    await skip_one(rejections)
    await asyncio.sleep(0.01)
    reader, trainer = asyncio.create_task(rejections.send()), asyncio.create_task(rejections.flush())
    await asyncio.sleep(0.01)
    assert not trainer.done()
    bus.release.set()
    await asyncio.gather(reader, trainer)
    assert len(arrived(bus)) == 1


async def test_rows_are_numbered_in_the_order_in_which_they_count_and_keep_their_number() -> None:
    bus = unreliable(DeliveryUnknown("late"))
    rejections = rejects_on(bus)
    for detail in ("first", "second"):
        await skip_one(rejections, detail)
    await rejections.flush()
    assert {(row.detail, row.lineage, row.sequence) for row in arrived(bus)} == {
        ("first", 3, 1),
        ("second", 3, 2),
    }
    assert rejections.tally.count == 2


async def test_flushing_does_not_wait_for_rows_written_after_it_was_asked() -> None:
    bus = unreliable()
    rejections = rejects_on(bus, FullPublisher)
    await skip_one(rejections)
    settling = asyncio.create_task(rejections.flush())
    await asyncio.sleep(0)
    rejections.skip(RecordRef("d/0/0/1", 0, 6), "d/0/0", SkipReason.STALE, "later", 3)
    await within(settling, 1)
    assert len(arrived(bus)) == 1
