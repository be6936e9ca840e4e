import asyncio
from collections.abc import Iterator

import pytest

from streamrl.bus.port import Outgoing
from streamrl.producers.generation.outbox import MAX_REFUSALS, Outbox
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown
from tests.fakes.publisher import FailingBus
from tests.fakes.waiting import until

RECORD = Outgoing("t", b"value", "group", partition=0)


def bus_that(*errors: BusError | None) -> FailingBus:
    left: Iterator[BusError | None] = iter(errors)
    bus = FailingBus(fail=lambda record: next(left, None))
    bus.create_topic("t", 1)
    return bus


async def test_a_record_of_unknown_fate_is_sent_again_unchanged() -> None:
    bus = bus_that(DeliveryUnknown("late"), BusUnavailable("gone"))
    await Outbox(await bus.publisher("w"), 10).deliver(RECORD)
    assert bus.attempts == [RECORD] * 3
    assert [record.value for record in bus.log("t").partitions[0]] == [b"value"]


async def test_a_record_the_broker_keeps_refusing_is_an_error() -> None:
    bus = bus_that(*[BusError("refused")] * MAX_REFUSALS)
    outbox = Outbox(await bus.publisher("w"), 10)
    with pytest.raises(BusError, match="refused"):
        await outbox.deliver(RECORD)
    assert outbox.undelivered == 0


async def test_the_outbox_is_full_while_the_broker_is_down() -> None:
    down = True
    bus = FailingBus(fail=lambda record: BusUnavailable("gone") if down else None)
    bus.create_topic("t", 1)
    outbox = Outbox(await bus.publisher("w"), 2)
    deliveries = [asyncio.create_task(outbox.deliver(RECORD)) for _ in range(2)]
    await until(lambda: outbox.is_full)
    down = False
    await asyncio.gather(*deliveries)
    assert not outbox.is_full
