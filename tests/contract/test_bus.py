"""The promises of ``bus.port``, kept by every adapter."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import pytest

from streamrl.bus.port import Bus, Outgoing, Position, Publisher, Record, Start, Subscription, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused
from tests.contract.buses import BUSES, bus_with_topic
from tests.progress import patience

PARTITIONS = 4
MIB = 1 << 20


class Adapter:
    """A bus, a topic of its own with four partitions, and everything opened on it."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self.bus = bus
        self.topic = topic
        self._opened: list[Publisher | Subscription] = []

    async def publisher(self) -> Publisher:
        publisher = await self.bus.publisher("writer")
        self._opened.append(publisher)
        return publisher

    async def subscribe(
        self, start: Start = "earliest", partitions: Iterable[int] | None = None, group_id: str | None = None
    ) -> Subscription:
        subscription = await self.bus.subscribe(
            [self.topic], client_id="reader", start=start, partitions=partitions, group_id=group_id
        )
        self._opened.append(subscription)
        return subscription

    def record(self, value: bytes | None, *, key: str | None = "k", partition: int | None = None) -> Outgoing:
        return Outgoing(self.topic, value, key, partition)

    def at(self, partition: int) -> TopicPartition:
        return TopicPartition(self.topic, partition)

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()


async def read(subscription: Subscription, count: int) -> list[Record]:
    """Exactly so many records, in the order in which they come."""
    records: list[Record] = []
    async with patience(15):
        while len(records) < count:
            records += await subscription.poll(max_records=count - len(records), timeout_s=0.2)
    return records


@pytest.fixture(params=BUSES)
async def adapter(request: pytest.FixtureRequest) -> AsyncIterator[Adapter]:
    found = await bus_with_topic(request, "contract", PARTITIONS)
    made = Adapter(found.bus, found.topic)
    yield made
    await made.close()


async def test_order_within_a_partition_is_the_order_of_submission(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    futures = [await publisher.submit(adapter.record(b"%d" % n, partition=n % 2)) for n in range(2000)]
    positions = await asyncio.gather(*futures)
    assert positions == [Position(adapter.topic, n % 2, n // 2) for n in range(2000)]
    records = await read(await adapter.subscribe(), 2000)
    for partition in (0, 1):
        mine = [record for record in records if record.partition == partition]
        assert [int(record.value or b"") for record in mine] == list(range(partition, 2000, 2))
        assert [record.offset for record in mine] == list(range(1000))


async def test_a_key_always_goes_to_the_same_partition(adapter: Adapter) -> None:
    first, second = await adapter.publisher(), await adapter.publisher()
    keys = [f"group-{n}" for n in range(32)]
    once = [(await first.publish(adapter.record(b"", key=key))).partition for key in keys]
    again = [(await second.publish(adapter.record(b"", key=key))).partition for key in keys]
    assert once == again
    assert len(set(once)) > 1


async def test_an_explicit_partition_wins_over_the_key(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    for partition in range(PARTITIONS):
        assert (await publisher.publish(adapter.record(b"", partition=partition))).partition == partition


async def test_a_partition_that_does_not_exist_is_refused(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    with pytest.raises(BusError, match="below 4"):
        await publisher.submit(adapter.record(b"", partition=PARTITIONS))


async def test_latest_is_pinned_when_subscribe_returns(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    await publisher.publish(adapter.record(b"before", partition=0))
    subscription = await adapter.subscribe("latest")
    await publisher.publish(adapter.record(b"after", partition=0))
    await publisher.publish(adapter.record(b"after", partition=3))
    records = await read(subscription, 2)
    assert {(record.partition, record.value) for record in records} == {(0, b"after"), (3, b"after")}


async def test_reading_starts_at_the_named_offsets_and_else_at_the_earliest(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    for n in range(6):
        await publisher.publish(adapter.record(b"%d" % n, partition=n % 2))
    subscription = await adapter.subscribe({adapter.at(0): 2})
    records = await read(subscription, 4)
    assert sorted(record.value or b"" for record in records) == [b"1", b"3", b"4", b"5"]


async def test_a_start_after_the_end_is_refused(adapter: Adapter) -> None:
    with pytest.raises(DataLossRefused, match="offset 5"):
        await adapter.subscribe({adapter.at(1): 5})


async def test_only_the_numbered_partitions_are_read(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    for partition in range(PARTITIONS):
        await publisher.publish(adapter.record(b"%d" % partition, partition=partition))
    subscription = await adapter.subscribe(partitions=[1, 3])
    assert subscription.partitions() == {adapter.at(1), adapter.at(3)}
    assert {record.value for record in await read(subscription, 2)} == {b"1", b"3"}
    assert await subscription.poll(timeout_s=0.1) == []


async def test_a_paused_partition_delivers_nothing_until_resumed(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    subscription = await adapter.subscribe(partitions=[0, 1])
    subscription.pause([adapter.at(0)])
    await publisher.publish(adapter.record(b"held", partition=0))
    await publisher.publish(adapter.record(b"free", partition=1))
    assert [record.value for record in await read(subscription, 1)] == [b"free"]
    assert await subscription.poll(timeout_s=0.3) == []
    subscription.resume([adapter.at(0)])
    assert [record.value for record in await read(subscription, 1)] == [b"held"]


async def test_positions_and_end_offsets_give_a_readers_lag(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    for _ in range(3):
        await publisher.publish(adapter.record(b"", partition=0))
    subscription = await adapter.subscribe(partitions=[0, 1])
    assert await subscription.positions() == {adapter.at(0): 0, adapter.at(1): 0}
    assert await subscription.end_offsets() == {adapter.at(0): 3, adapter.at(1): 0}
    # Of some, and never of what it does not read.
    asked = [adapter.at(0), adapter.at(2)]
    assert await subscription.end_offsets(asked) == {adapter.at(0): 3}
    assert await subscription.beginning_offsets(asked) == {adapter.at(0): 0}
    assert await subscription.positions(asked) == {adapter.at(0): 0}
    await read(subscription, 2)
    assert await subscription.positions() == {adapter.at(0): 2, adapter.at(1): 0}


async def test_a_commit_does_not_move_a_new_reader(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    for n in range(3):
        await publisher.publish(adapter.record(b"%d" % n, partition=0))
    first = await adapter.subscribe(partitions=[0], group_id="lag-display")
    await read(first, 3)
    await first.commit({})
    await first.commit({adapter.at(0): 2})
    second = await adapter.subscribe(partitions=[0], group_id="lag-display")
    assert [record.offset for record in await read(second, 3)] == [0, 1, 2]


async def test_a_record_without_a_value_arrives_as_one(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    await publisher.publish(adapter.record(None, key="gone", partition=2))
    await publisher.publish(adapter.record(b"", key=None, partition=2))
    tombstone, empty = await read(await adapter.subscribe(), 2)
    assert (tombstone.key, tombstone.value) == ("gone", None)
    assert (empty.key, empty.value) == (None, b"")


async def test_headers_arrive_in_order_and_unchanged(adapter: Adapter) -> None:
    headers = (("schema", b"trajectory"), ("dlq-error", b"\x00\xff"), ("schema", b"again"), ("empty", b""))
    publisher = await adapter.publisher()
    await publisher.publish(Outgoing(adapter.topic, b"", "k", 0, headers))
    (record,) = await read(await adapter.subscribe(), 1)
    assert record.headers == headers


async def test_the_time_of_publishing_is_recorded_in_seconds(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    before = time.time()
    await publisher.publish(adapter.record(b"", partition=0))
    (record,) = await read(await adapter.subscribe(), 1)
    assert before - 0.01 <= record.timestamp <= time.time() + 0.01


async def test_large_records_arrive_between_small_ones(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    values = [b"small", b"\x01" * (8 * MIB), b"small", b"\x02" * (8 * MIB), b"small"]
    futures = [await publisher.submit(adapter.record(value, partition=0)) for value in values]
    await asyncio.gather(*futures)
    records = await read(await adapter.subscribe(), len(values))
    assert [record.value for record in records] == values


async def test_submit_resolves_to_the_records_position(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    futures = [await publisher.submit(adapter.record(b"%d" % n, partition=1)) for n in range(10)]
    await publisher.flush()
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures] == [Position(adapter.topic, 1, n) for n in range(10)]


async def test_close_delivers_what_was_submitted(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    futures = [await publisher.submit(adapter.record(b"x", partition=0)) for _ in range(100)]
    await publisher.close()
    assert [future.result().offset for future in futures] == list(range(100))


async def test_a_closed_publisher_refuses(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    await publisher.close()
    await publisher.close()
    with pytest.raises(BusError, match="closed"):
        await publisher.submit(adapter.record(b""))


async def test_a_closed_subscription_refuses(adapter: Adapter) -> None:
    subscription = await adapter.subscribe()
    await subscription.close()
    await subscription.close()
    with pytest.raises(BusError, match="closed"):
        await subscription.poll(timeout_s=0.1)


async def test_an_unknown_topic_is_unavailable_to_writers_and_readers(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    with pytest.raises(BusUnavailable, match="no-such-topic"):
        await publisher.submit(Outgoing("no-such-topic", b"", None))
    with pytest.raises(BusUnavailable, match="no-such-topic"):
        await adapter.bus.subscribe([adapter.topic, "no-such-topic"], client_id="reader")


async def test_a_poll_that_finds_nothing_returns_after_its_time(adapter: Adapter) -> None:
    subscription = await adapter.subscribe()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await subscription.poll(timeout_s=0.3) == []
    assert 0.25 <= loop.time() - began < 2.0


async def test_a_poll_never_returns_more_than_asked_for(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    for n in range(10):
        await publisher.publish(adapter.record(b"%d" % n, partition=n % PARTITIONS))
    subscription = await adapter.subscribe()
    sizes: list[int] = []
    while sum(sizes) < 10:
        sizes.append(len(await subscription.poll(max_records=3, timeout_s=1.0)))
    assert max(sizes) <= 3


async def test_a_cancelled_poll_loses_nothing(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    subscription = await adapter.subscribe()
    for n in range(20):
        poll = asyncio.create_task(subscription.poll(timeout_s=5))
        await asyncio.sleep(0.002 * (n % 3))
        poll.cancel()
        await asyncio.wait([poll])
        assert poll.cancelled()
        await publisher.publish(adapter.record(b"%d" % n, partition=0))
        assert [record.value for record in await read(subscription, 1)] == [b"%d" % n]


async def test_a_reader_that_never_waits_does_not_stop_the_loop(adapter: Adapter) -> None:
    publisher = await adapter.publisher()
    subscription = await adapter.subscribe()
    await publisher.submit(adapter.record(b"late", partition=0))
    async with patience(10):
        while not (records := await subscription.poll(timeout_s=0)):
            pass
    assert records[0].value == b"late"
