import asyncio
import struct
from collections.abc import Iterable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.record.util import calc_crc32c
from aiokafka.structs import TopicPartition as KafkaPartition

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory
from streamrl.bus.port import Outgoing, Record, TopicPartition
from streamrl.schemas.errors import BusError, DataLossRefused, WireError
from tests.broker_fixture import unique_numbers
from tests.contract.topics import new_topic
from tests.progress import patience

_numbers = unique_numbers()
_CRC_AT, _CRC_FROM = 17, 21
"""Of a record batch of the second format: where its checksum stands, and from where on it counts."""


@pytest.fixture
async def topic(bootstrap_servers: str) -> str:
    return await new_topic(bootstrap_servers, "subscription", 2)


@pytest.fixture
def bus(bootstrap_servers: str) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers))


async def publish(bus: KafkaBus, topic: str, *values: bytes, partition: int = 0) -> None:
    publisher = await bus.publisher("writer")
    for value in values:
        await publisher.submit(Outgoing(topic, value, None, partition))
    await publisher.close()


async def publish_unreadable_header(servers: str, topic: str) -> None:
    """A record whose header name is not UTF-8, which aiokafka's consumer cannot get past by itself."""
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    batch = producer.create_batch()
    batch.append(timestamp=None, key=b"k", value=b"v", headers=[("@@", b"x")])
    raw = batch._build()
    place = raw.index(b"@@")
    raw[place : place + 2] = b"\xff\xfe"
    struct.pack_into(">I", raw, _CRC_AT, calc_crc32c(bytes(raw[_CRC_FROM:])))
    await (await producer.send_batch(batch, topic, partition=0))
    await producer.stop()


async def test_a_record_with_an_unreadable_header_is_delivered_empty_and_the_next_ones_follow(
    bootstrap_servers: str, bus: KafkaBus, topic: str
) -> None:
    await publish(bus, topic, b"0", b"1")
    await publish_unreadable_header(bootstrap_servers, topic)
    await publish(bus, topic, b"3", b"4")
    await publish(bus, topic, b"other", partition=1)
    subscription = await bus.subscribe([topic], client_id="reader")
    records: list[Record] = []
    async with patience(15):
        while len(records) < 6:
            records += await subscription.poll(timeout_s=0.5)
    await subscription.close()
    mine = [record for record in records if record.partition == 0]
    assert [(record.offset, record.value) for record in mine] == list(enumerate([b"0", b"1", None, b"3", b"4"]))
    with pytest.raises(WireError, match="could not read"):
        mine[2].message()


async def test_a_poll_cancelled_at_any_turn_of_the_loop_loses_nothing(bus: KafkaBus, topic: str) -> None:
    publisher = await bus.publisher("writer")
    subscription = await bus.subscribe([topic], client_id="reader")
    values: list[bytes | None] = []
    cancelled = 0
    for n in range(36):
        await publisher.publish(Outgoing(topic, b"%d" % n, None, 0))
        async with patience(10):
            while not subscription._consumer._fetcher._records:  # a poll that finds a record ends after a few turns
                await asyncio.sleep(0.01)
        poll = asyncio.create_task(subscription.poll(timeout_s=5))
        for _ in range(n % 12):
            await asyncio.sleep(0)
        poll.cancel()
        try:
            values += [record.value for record in await poll]
        except asyncio.CancelledError:
            cancelled += 1
    async with patience(10):
        while len(values) < 36:
            values += [record.value for record in await subscription.poll(timeout_s=0.2)]
    assert values == [b"%d" % n for n in range(36)]
    assert 0 < cancelled < 36
    await subscription.close()
    await publisher.close()


async def test_a_consumer_that_stopped_reading_is_replaced(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(stall_timeout_s=0.8))
    await publish(bus, topic, b"0")
    subscription = await bus.subscribe([topic], client_id="reader")
    assert [record.value for record in await subscription.poll(timeout_s=5)] == [b"0"]
    subscription._consumer._fetcher._fetch_task.cancel()
    await publish(bus, topic, b"1", b"2")
    values: list[bytes | None] = []
    async with patience(15):
        while len(values) < 2:
            values += [record.value for record in await subscription.poll(timeout_s=0.2)]
    assert values == [b"1", b"2"]
    await subscription.close()


async def test_a_reader_that_no_new_consumer_gets_moving_ends_with_an_error(
    bootstrap_servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    usual = ConsumerFactory.open_consumer

    async def without_a_fetcher(self: ConsumerFactory, partitions: Iterable[TopicPartition]) -> AIOKafkaConsumer:
        consumer = await usual(self, partitions)
        consumer._fetcher._fetch_task.cancel()
        made.append(consumer)
        return consumer

    monkeypatch.setattr(ConsumerFactory, "open_consumer", without_a_fetcher)
    bus = KafkaBus(
        KafkaSettings(bootstrap_servers=bootstrap_servers),
        limits=ClientLimits(stall_timeout_s=0.5, max_client_restarts=2),
    )
    subscription = await bus.subscribe([topic], client_id="reader")
    await publish(bus, topic, b"0")
    with pytest.raises(BusError, match=r"stuck in .*/0 at offset 0 after 2 attempts"):
        async with patience(15):
            while True:
                assert await subscription.poll(timeout_s=0.1) == []
    assert len(made) == 3
    await subscription.close()


async def test_a_paused_reader_is_never_taken_for_a_stuck_one(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(stall_timeout_s=0.5))
    subscription = await bus.subscribe([topic], client_id="reader")
    subscription.pause(subscription.partitions())
    await publish(bus, topic, b"0")
    consumer = subscription._consumer
    for _ in range(20):
        assert await subscription.poll(timeout_s=0.1) == []
    assert subscription._consumer is consumer
    subscription.resume(subscription.partitions())
    assert [record.value for record in await subscription.poll(timeout_s=5)] == [b"0"]
    await subscription.close()


async def test_a_start_at_records_that_retention_deleted_is_refused(
    bootstrap_servers: str, bus: KafkaBus, topic: str
) -> None:
    await publish(bus, topic, b"0", b"1", b"2")
    running = await bus.subscribe([topic], client_id="reader", partitions=[0])
    running.pause(running.partitions())
    await delete_before(bootstrap_servers, topic, 2)
    with pytest.raises(DataLossRefused, match="offset 1") as refused:
        await bus.subscribe([topic], client_id="reader", start={TopicPartition(topic, 0): 1})
    assert refused.value.holes == ((topic, 0, 1, 2),)
    running.resume(running.partitions())
    with pytest.raises(DataLossRefused, match="offset 0") as refused:
        async with patience(10):
            while True:
                assert await running.poll(timeout_s=0.2) == []
    assert refused.value.holes == ((topic, 0, 0, 2),)
    await running.close()
    earliest = await bus.subscribe([topic], client_id="reader")
    assert [record.value for record in await earliest.poll(timeout_s=5)] == [b"2"]
    await earliest.close()


async def delete_before(servers: str, topic: str, offset: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.delete_records({KafkaPartition(topic, 0): RecordsToDelete(before_offset=offset)})
    await admin.close()


async def test_a_reader_that_gets_no_offsets_any_more_is_replaced(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(stall_timeout_s=0.5))
    subscription = await bus.subscribe([topic], client_id="deaf")
    deaf = subscription._consumer
    # aiokafka's update of metadata died: nobody will ever end this wait, while fetching goes on
    deaf._client._md_update_fut = asyncio.get_running_loop().create_future()
    await publish(bus, topic, b"1")
    values = []
    async with patience(20):
        while subscription._consumer is deaf:
            values += [record.value for record in await subscription.poll(timeout_s=0.1)]
    await publish(bus, topic, b"2")
    while len(values) < 2:
        values += [record.value for record in await subscription.poll(timeout_s=0.1)]
    assert values == [b"1", b"2"]
    assert (await subscription.end_offsets())[TopicPartition(topic, 0)] == 2
    await subscription.close()


async def test_a_reader_without_prefetch_that_pauses_asks_nothing_and_then_gets_all_with_one_read(
    bus: KafkaBus, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscription = await bus.without_prefetch().subscribe([topic], client_id="looker")
    everything, fetches = subscription.partitions(), list[object]()
    subscription.pause(everything)
    fetch = Fetcher._proc_fetch_request

    def noted(*each: object) -> object:
        fetches.append(each)
        return fetch(*each)

    monkeypatch.setattr(Fetcher, "_proc_fetch_request", noted)
    publisher = await bus.publisher("writer")
    try:
        for turn in range(3):
            for number in range(8):
                await publisher.publish(Outgoing(topic, bytes([turn, number]), None, number % 2))
            await asyncio.sleep(0.3)
            assert len(fetches) == turn
            subscription.resume(everything)
            records = await subscription.poll(timeout_s=10)
            subscription.pause(everything)
            assert {record.value for record in records} == {bytes([turn, number]) for number in range(8)}
    finally:
        await publisher.close()
        await subscription.close()
