"""The promises of ``TransactionalPublisher``, and of subscriptions about transactions, kept by every adapter."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Outgoing, Record, Subscription, TopicPartition, TransactionalPublisher
from streamrl.schemas.errors import BusError, BusUnavailable, Superseded
from tests.contract.buses import BUSES, bus_with_topic
from tests.progress import patience

PARTITIONS = 2


class Adapter:
    """A bus, a topic of its own, and an id of its own; closes what it opened."""

    def __init__(self, bus: Bus, topic: str, servers: str | None) -> None:
        self.bus = bus
        self.topic = topic
        self.servers = servers
        self._opened: list[TransactionalPublisher | Subscription] = []

    async def holder(self) -> TransactionalPublisher:
        opened = await self.bus.transactional(f"{self.topic}.trainer")
        self._opened.append(opened)
        return opened

    async def reader(self) -> Subscription:
        opened = await self.bus.subscribe([self.topic], client_id="reader")
        self._opened.append(opened)
        return opened

    def records(self, *values: bytes, partition: int = 0) -> list[Outgoing]:
        return [Outgoing(self.topic, value, "k", partition) for value in values]

    async def committed(self, group_id: str) -> Mapping[TopicPartition, int]:
        if isinstance(self.bus, MemoryBus):
            return {tp: offset for (group, tp), offset in self.bus.committed.items() if group == group_id}
        admin = AIOKafkaAdminClient(bootstrap_servers=self.servers)
        await admin.start()
        found = await admin.list_consumer_group_offsets(group_id)
        await admin.close()
        return {TopicPartition(*tp): committed.offset for tp, committed in found.items()}

    async def shows(self, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
        async with patience(10):
            while await self.committed(group_id) != offsets:
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        for opened in self._opened:
            await opened.close()


@pytest.fixture(params=BUSES)
async def adapter(request: pytest.FixtureRequest) -> AsyncIterator[Adapter]:
    found = await bus_with_topic(request, "transactions", PARTITIONS)
    made = Adapter(found.bus, found.topic, found.servers)
    yield made
    await made.close()


async def read_to_the_end(subscription: Subscription, count: int) -> list[Record]:
    """So many records, which a broker may show a little later than the commit returns, and to the end of then."""
    records: list[Record] = []
    async with patience(15):
        while len(records) < count:
            records += await subscription.poll(timeout_s=0.2)
        ends = await subscription.end_offsets()
        while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
            records += await subscription.poll(timeout_s=0.2)
    return records


async def test_a_transaction_is_seen_whole_and_in_order(adapter: Adapter) -> None:
    holder = await adapter.holder()
    await holder.commit([*adapter.records(b"0", b"1"), *adapter.records(b"2", b"3", partition=1)])
    await holder.commit(adapter.records(b"4"))
    records = await read_to_the_end(await adapter.reader(), 5)
    assert [record.value for record in records if record.partition == 0] == [b"0", b"1", b"4"]
    assert [record.value for record in records if record.partition == 1] == [b"2", b"3"]


async def test_reading_to_the_end_ends_where_a_transaction_ended(adapter: Adapter) -> None:
    holder, reader = await adapter.holder(), await adapter.reader()
    assert await read_to_the_end(reader, 0) == []
    for n in range(3):
        await holder.commit(adapter.records(b"%d" % n))
        assert [record.value for record in await read_to_the_end(reader, 1)] == [b"%d" % n]
    async with patience(10):
        while await reader.positions() != await reader.end_offsets():
            assert await reader.poll(timeout_s=0.1) == []


async def test_headers_keys_and_empty_values_go_through_a_transaction(adapter: Adapter) -> None:
    holder = await adapter.holder()
    headers = (("schema", b"step-report"), ("schema", b"\xff"))
    await holder.commit([Outgoing(adapter.topic, b"x", "key", 0, headers), Outgoing(adapter.topic, None, None, 0)])
    first, second = await read_to_the_end(await adapter.reader(), 2)
    assert (first.key, first.value, first.headers) == ("key", b"x", headers)
    assert (second.key, second.value, second.headers) == (None, None, ())


async def test_a_newer_holder_fences_the_older_one_for_ever(adapter: Adapter) -> None:
    older = await adapter.holder()
    await older.commit(adapter.records(b"older"))
    newer = await adapter.holder()
    for _ in range(2):
        with pytest.raises(Superseded, match="newer"):
            await older.commit(adapter.records(b"zombie"))
    await newer.commit(adapter.records(b"newer"))
    with pytest.raises(Superseded):
        await older.commit(adapter.records(b"zombie"))
    await newer.commit(adapter.records(b"newest"))
    values = [record.value for record in await read_to_the_end(await adapter.reader(), 3)]
    assert values == [b"older", b"newer", b"newest"]


async def test_offsets_are_committed_with_the_records(adapter: Adapter) -> None:
    holder, group = await adapter.holder(), f"{adapter.topic}-lag"
    offsets = {TopicPartition(adapter.topic, 0): 7, TopicPartition(adapter.topic, 1): 9}
    await holder.commit(adapter.records(b"0"), offsets=offsets, group_id=group)
    await adapter.shows(group, offsets)
    await holder.commit([], offsets={TopicPartition(adapter.topic, 0): 8}, group_id=group)
    await adapter.shows(group, offsets | {TopicPartition(adapter.topic, 0): 8})


async def test_a_fenced_holder_commits_no_offsets(adapter: Adapter) -> None:
    older, group = await adapter.holder(), f"{adapter.topic}-lag"
    await adapter.holder()
    with pytest.raises(Superseded):
        await older.commit([], offsets={TopicPartition(adapter.topic, 0): 3}, group_id=group)
    assert await adapter.committed(group) == {}


async def test_a_refused_transaction_leaves_nothing_and_the_next_one_is_taken(adapter: Adapter) -> None:
    holder = await adapter.holder()
    with pytest.raises(BusUnavailable, match="no-such-topic"):
        await holder.commit([*adapter.records(b"half"), Outgoing("no-such-topic", b"", None)])
    with pytest.raises(BusError, match="below 2"):
        await holder.commit([*adapter.records(b"half"), Outgoing(adapter.topic, b"", None, PARTITIONS)])
    await holder.commit(adapter.records(b"whole"))
    assert [record.value for record in await read_to_the_end(await adapter.reader(), 1)] == [b"whole"]


async def test_a_transaction_of_nothing_is_none(adapter: Adapter) -> None:
    holder, reader = await adapter.holder(), await adapter.reader()
    await holder.commit([])
    assert await reader.end_offsets() == {TopicPartition(adapter.topic, n): 0 for n in range(PARTITIONS)}


async def test_a_closed_holder_refuses(adapter: Adapter) -> None:
    holder = await adapter.holder()
    await holder.close()
    await holder.close()
    with pytest.raises(BusError, match="closed"):
        await holder.commit(adapter.records(b""))


async def test_beginning_offsets_name_the_oldest_record(adapter: Adapter) -> None:
    reader = await adapter.reader()
    await (await adapter.holder()).commit(adapter.records(b"0"))
    assert await reader.beginning_offsets() == {TopicPartition(adapter.topic, n): 0 for n in range(PARTITIONS)}
