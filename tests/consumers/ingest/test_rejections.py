import asyncio

import pytest

from streamrl.bus.port import Outgoing, Position
from streamrl.consumers.ingest.rejections import ATTEMPTS, RejectionWriter, SkipTally
from streamrl.schemas.codec import decode
from streamrl.schemas.errors import BusError, DeliveryUnknown
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord
from tests.progress import within


class UnreliablePublisher:
    """Takes every record and answers as it is told, in order; later ones arrive."""

    def __init__(self, *answers: BusError | None) -> None:
        self.answers = list(answers)
        self.taken: list[Outgoing] = []
        self.arrived: list[Outgoing] = []

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        self.taken.append(record)
        answer = self.answers.pop(0) if self.answers else None
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(self._answer, future, record, answer)
        return future

    def _answer(self, future: "asyncio.Future[Position]", record: Outgoing, answer: BusError | None) -> None:
        if answer is None:
            self.arrived.append(record)
            future.set_result(Position(record.topic, 0, len(self.arrived) - 1))
        else:
            future.set_exception(answer)

    async def publish(self, record: Outgoing) -> Position:
        return await (await self.submit(record))

    async def flush(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)


async def skip_one(rejections: RejectionWriter, detail: str = "d") -> None:
    rejections.skip(RecordRef("d/0/0/0", 0, 5), "d/0/0", SkipReason.STALE, detail, 3)
    await rejections.send()


def rejects_on(publisher: UnreliablePublisher) -> RejectionWriter:
    return RejectionWriter("r", "grpo", lambda: 0.0, SkipTally(3), publisher)


async def test_no_row_is_lost() -> None:
    publisher = UnreliablePublisher(DeliveryUnknown("late"), None, DeliveryUnknown("late"))
    rejections = rejects_on(publisher)
    await skip_one(rejections, "first")
    await skip_one(rejections, "second")
    await rejections.flush()
    assert len(publisher.arrived) == 2
    assert len(publisher.taken) == 4
    assert rejections.tally.reasons == {"stale": 2}


async def test_a_row_that_failed_long_before_does_not_count_as_sent() -> None:
    publisher = UnreliablePublisher(DeliveryUnknown("late"))
    rejections = rejects_on(publisher)
    await skip_one(rejections)
    await asyncio.sleep(0.01)
    assert publisher.arrived == []
    await rejections.flush()
    assert len(publisher.arrived) == 1


async def test_a_broker_that_never_answers_is_not_asked_for_ever() -> None:
    publisher = UnreliablePublisher(*(DeliveryUnknown("late") for _ in range(100)))
    rejections = rejects_on(publisher)
    await skip_one(rejections)
    with pytest.raises(DeliveryUnknown, match="checkpoint must not go without"):
        await rejections.flush()
    assert len(publisher.taken) == ATTEMPTS


async def test_a_refused_row_is_an_error() -> None:
    rejections = rejects_on(UnreliablePublisher(BusError("too large")))
    await skip_one(rejections)
    with pytest.raises(BusError, match="too large"):
        await rejections.flush()
    with pytest.raises(BusError, match="too large"):
        await rejections.send()


async def test_long_or_broken_text_is_cut_and_mended() -> None:
    publisher = UnreliablePublisher()
    rejections = rejects_on(publisher)
    rejections.skip(RecordRef("", 0, 5), "k" * 999, SkipReason.POISON, "\ud800" * 5000, 3)
    await rejections.flush()
    assert len(publisher.arrived) == 1


class SlowPublisher(UnreliablePublisher):
    """Has no buffer space from the second record on, until it is given some."""

    def __init__(self, *answers: BusError | None) -> None:
        super().__init__(*answers)
        self.space = asyncio.Event()

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        if self.taken:
            await self.space.wait()
        return await super().submit(record)


async def test_flushing_waits_for_a_row_that_another_task_is_sending_again() -> None:
    publisher = SlowPublisher(DeliveryUnknown("late"))
    rejections = rejects_on(publisher)
    await skip_one(rejections)
    await asyncio.sleep(0.01)
    reader, trainer = asyncio.create_task(rejections.send()), asyncio.create_task(rejections.flush())
    await asyncio.sleep(0.01)
    assert not trainer.done()
    publisher.space.set()
    await asyncio.gather(reader, trainer)
    assert len(publisher.arrived) == 1


async def test_rows_are_numbered_in_the_order_in_which_they_count_and_keep_their_number() -> None:
    publisher = UnreliablePublisher(DeliveryUnknown("late"))
    rejections = rejects_on(publisher)
    for detail in ("first", "second"):
        await skip_one(rejections, detail)
    await rejections.flush()
    rows = [decode(record.value, record.headers) for record in publisher.arrived]
    assert {(row.detail, row.lineage, row.sequence) for row in rows if isinstance(row, SkipRecord)} == {
        ("first", 3, 1),
        ("second", 3, 2),
    }
    assert rejections.tally.count == 2


async def test_flushing_does_not_wait_for_rows_written_after_it_was_asked() -> None:
    publisher = SlowPublisher()
    rejections = rejects_on(publisher)
    await skip_one(rejections)
    settling = asyncio.create_task(rejections.flush())
    await asyncio.sleep(0)
    rejections.skip(RecordRef("d/0/0/1", 0, 6), "d/0/0", SkipReason.STALE, "later", 3)
    await within(settling, 1)
    assert len(publisher.arrived) == 1
