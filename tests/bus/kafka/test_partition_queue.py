import asyncio
from dataclasses import dataclass, field

import pytest

from streamrl.bus.kafka import publisher as module
from streamrl.bus.kafka.publisher import PartitionQueue, RecordBatch, new_builder
from streamrl.bus.port import Outgoing, Position, TopicPartition
from streamrl.schemas.errors import BusError, DeliveryUnknown
from tests.progress import within

NAME = TopicPartition("t", 3)


@dataclass
class Wire:
    """Stands for the broker: holds each batch until it is told to take it."""

    batch_bytes: int = 1000
    deadline_s: float = 30.0
    sent: list[int] = field(default_factory=list)
    dropped: list[RecordBatch] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def queue(self) -> PartitionQueue:
        return PartitionQueue(NAME, self.new_batch, self.send, self.dropped.append, 0.0)

    def new_batch(self, name: TopicPartition) -> RecordBatch:
        return RecordBatch(new_builder(self.batch_bytes, "none"), name, self.deadline_s)

    async def send(self, batch: RecordBatch) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.gate.wait()
        await asyncio.sleep(0)
        first = sum(self.sent)
        self.sent.append(batch.builder.record_count())
        batch.stored(first)
        self.at_once -= 1


def record(size: int = 100) -> Outgoing:
    return Outgoing("t", bytes(size), "k", 3)


async def settle(queue: PartitionQueue) -> None:
    while waited_for := queue.unsettled():
        await asyncio.wait(waited_for)


async def test_batches_leave_one_after_the_other() -> None:
    wire = Wire()
    queue = wire.queue()
    futures = [queue.append(record(), 100) for _ in range(50)]
    wire.gate.set()
    await settle(queue)
    assert len(wire.sent) > 3
    assert wire.most_at_once == 1
    assert all(future.done() for future in futures)


async def test_records_added_during_a_send_leave_in_one_batch() -> None:
    wire = Wire(batch_bytes=1 << 20)
    queue = wire.queue()
    queue.append(record(), 100)
    await asyncio.sleep(0.01)
    for _ in range(20):
        queue.append(record(), 100)
    wire.gate.set()
    await settle(queue)
    assert wire.sent == [1, 20]


async def test_a_record_larger_than_a_batch_travels_alone() -> None:
    wire = Wire(batch_bytes=1000)
    queue = wire.queue()
    for size in (100, 5000, 100):
        queue.append(record(size), size)
    wire.gate.set()
    await settle(queue)
    assert wire.sent == [1, 1, 1]


async def test_past_the_deadline_every_record_is_unknown_and_what_was_not_sent_is_dropped() -> None:
    wire = Wire(deadline_s=0.05, batch_bytes=300)
    queue = wire.queue()
    futures = [queue.append(record(), 100) for _ in range(6)]
    results = await within(asyncio.gather(*futures, return_exceptions=True), 2)
    assert all(isinstance(result, DeliveryUnknown) for result in results)
    wire.gate.set()
    while queue._task is not None:
        await asyncio.sleep(0)
    assert len(wire.sent) == 1
    assert wire.dropped


async def test_an_expired_batch_takes_no_further_records() -> None:
    wire = Wire(deadline_s=0.05, batch_bytes=1 << 20)
    queue = wire.queue()
    on_its_way = queue.append(record(), 100)
    await asyncio.sleep(0.01)
    waiting = queue.append(record(), 100)
    await asyncio.wait([on_its_way, waiting])
    late = queue.append(record(), 100)
    assert not late.done()
    wire.gate.set()
    await within(late, 2)
    assert isinstance(on_its_way.exception(), DeliveryUnknown)
    assert isinstance(waiting.exception(), DeliveryUnknown)


async def test_a_batch_too_old_to_give_a_record_its_whole_deadline_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_AGE_S", 0.3)
    wire = Wire(batch_bytes=1 << 20)
    queue = wire.queue()
    queue.append(record(), 100)
    await asyncio.sleep(0)
    queue.append(record(), 100)
    await asyncio.sleep(0.4)
    queue.append(record(), 100)
    wire.gate.set()
    await settle(queue)
    assert wire.sent == [2, 1]


async def test_a_process_that_stood_still_gives_an_empty_batch_its_first_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_AGE_S", -1.0)
    wire = Wire(batch_bytes=1 << 20)
    queue = wire.queue()
    futures = [queue.append(record(), 100) for _ in range(2)]
    wire.gate.set()
    await settle(queue)
    assert [future.result().offset for future in futures] == [0, 1]
    assert wire.sent == [1, 1]


async def test_stopping_fails_what_is_not_settled() -> None:
    wire = Wire(batch_bytes=300)
    queue = wire.queue()
    futures = [queue.append(record(), 100) for _ in range(6)]
    await asyncio.sleep(0.01)
    await queue.stop(BusError("closed"))
    assert all(str(future.exception()) == "closed" for future in futures)
    assert not queue.unsettled()


async def test_a_cancelled_future_does_not_disturb_others() -> None:
    wire = Wire(batch_bytes=1 << 20)
    queue = wire.queue()
    futures = [queue.append(record(), 100) for _ in range(3)]
    futures[1].cancel()
    wire.gate.set()
    await settle(queue)
    assert futures[0].result() == Position("t", 3, 0)
    assert futures[2].result() == Position("t", 3, 2)
