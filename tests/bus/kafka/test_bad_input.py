"""What a reader does with whatever may stand on a real topic: each test says what happens.

What it does with bytes that the broker's disk damaged, tests/bus/embedded/test_cluster.py says.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.producer.message_accumulator import BatchBuilder

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, Record, Subscription, TopicPartition
from streamrl.schemas.codec import headers_of
from streamrl.schemas.errors import BusError, DataLossRefused, WireError
from tests.broker_fixture import unique_numbers
from tests.contract.topics import create_topic, new_topic
from tests.fuzz.targets import forget_peak, memory_kib
from tests.progress import patience
from tests.schemas.examples import examples, trajectory

MIB = 1 << 20
_numbers = unique_numbers()


@pytest.fixture
async def topic(bootstrap_servers: str) -> str:
    return await new_topic(bootstrap_servers, "bad-input")


@pytest.fixture
def bus(bootstrap_servers: str) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(stall_timeout_s=1.0))


@pytest.fixture
async def producer(bootstrap_servers: str) -> AsyncIterator[AIOKafkaProducer]:
    """A stranger's, which can write what ours cannot."""
    made = AIOKafkaProducer(bootstrap_servers=bootstrap_servers, max_request_size=512 * MIB)
    await made.start()
    yield made
    await made.stop()


async def write(bus: KafkaBus, *records: Outgoing) -> None:
    publisher = await bus.publisher("writer")
    for record in records:
        await publisher.publish(record)
    await publisher.close()


async def read(subscription: Subscription, count: int) -> list[Record]:
    records: list[Record] = []
    async with patience(20):
        while len(records) < count:
            records += await subscription.poll(timeout_s=0.2)
    return records


async def read_all(bus: KafkaBus, topic: str, count: int) -> list[Record]:
    subscription = await bus.subscribe([topic], client_id="reader")
    records = await read(subscription, count)
    await subscription.close()
    return records


async def write_batch(producer: AIOKafkaProducer, topic: str, builder: BatchBuilder) -> None:
    await (await producer.send_batch(builder, topic, partition=0))


async def test_tombstones_empty_values_and_missing_keys_are_delivered_as_what_they_are_and_decode_to_no_message(
    bus: KafkaBus, topic: str
) -> None:
    named = headers_of(trajectory())
    await write(bus, *(Outgoing(topic, value, key, 0, named) for key in ("k", None) for value in (None, b"", b"x")))
    records = await read_all(bus, topic, 6)
    assert [(record.key, record.value) for record in records] == list(itertools.product(("k", None), (None, b"", b"x")))
    for record in records:
        with pytest.raises(WireError, match="expected a trajectory frame"):
            record.message()


async def test_headers_without_value_or_twice_are_delivered_and_the_last_one_counts(
    producer: AIOKafkaProducer, bus: KafkaBus, topic: str
) -> None:
    builder = producer.create_batch()
    odd = [("schema", None), ("schema", b"trajectory"), ("schema", b"nothing of ours"), ("schema-version", b"1")]
    builder.append(timestamp=None, key=b"\xff\xfe", value=b"v", headers=odd)
    builder.append(timestamp=None, key=b"k", value=b"v", headers=[("schema", None), ("schema-version", None)])
    await write_batch(producer, topic, builder)
    first, second = await read_all(bus, topic, 2)
    assert first.headers == tuple(odd)
    assert first.key == "��"
    for record, told in ((first, "nothing of ours"), (second, "schema")):
        with pytest.raises(WireError, match=told):
            record.message()


async def test_another_topics_message_decodes_to_what_it_says_it_is(bus: KafkaBus, topic: str) -> None:
    heartbeat = examples()["heartbeat"]
    await write(bus, Outgoing.of(topic, heartbeat, key=None, partition=0))
    (record,) = await read_all(bus, topic, 1)
    assert record.message() == heartbeat
    with pytest.raises(WireError, match=r"trajectory\."):
        record._replace(headers=headers_of(trajectory())).message()


async def test_times_from_the_past_and_the_future_are_delivered_in_offset_order(
    producer: AIOKafkaProducer, bus: KafkaBus, topic: str
) -> None:
    now_ms = int(time.time() * 1000)
    times = [now_ms + 3_000_000, 1, now_ms, 1_000_000_000_000]
    for sent_ms in times:
        await producer.send_and_wait(topic, b"x", partition=0, timestamp_ms=sent_ms)
    records = await read_all(bus, topic, 4)
    assert [(record.offset, record.timestamp) for record in records] == [
        (n, time / 1000) for n, time in enumerate(times)
    ]


async def test_aborted_records_leave_gaps_and_reading_goes_on_and_is_not_taken_for_stuck(
    bootstrap_servers: str, bus: KafkaBus, topic: str
) -> None:
    aborting = AIOKafkaProducer(bootstrap_servers=bootstrap_servers, transactional_id=f"aborts-{topic}")
    await aborting.start()
    for n in range(3):
        await aborting.begin_transaction()
        await (await aborting.send(topic, b"aborted", partition=0))
        await aborting.abort_transaction()
        await write(bus, Outgoing(topic, b"%d" % n, None, 0))
    await aborting.begin_transaction()
    await (await aborting.send(topic, b"aborted", partition=0))
    await aborting.abort_transaction()
    await aborting.stop()
    patient = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(stall_timeout_s=3.0))
    subscription = await patient.subscribe([topic], client_id="reader")
    consumer = subscription._consumer
    records = await read(subscription, 3)
    assert [record.value for record in records] == [b"0", b"1", b"2"]
    assert all(offset in (3 * n + 1, 3 * n + 2) for n, offset in enumerate(record.offset for record in records))
    for _ in range(22):  # longer than the stall time-out; the log ends in aborted records and markers
        assert await subscription.poll(timeout_s=0.2) == []
    assert subscription._consumer is consumer
    assert await subscription.positions() == await subscription.end_offsets() == {TopicPartition(topic, 0): 11}
    await subscription.close()


async def test_an_offset_beyond_the_end_is_refused_with_the_hole_named(bus: KafkaBus, topic: str) -> None:
    await write(bus, Outgoing(topic, b"0", None, 0))
    with pytest.raises(DataLossRefused, match="offset 9") as refused:
        await bus.subscribe([topic], client_id="reader", start={TopicPartition(topic, 0): 9})
    assert refused.value.holes == ((topic, 0, 1, 9),)


async def test_partitions_that_are_added_end_a_reader_of_all_and_the_next_one_reads_them(
    bootstrap_servers: str, bus: KafkaBus, topic: str
) -> None:
    everything = await bus.subscribe([topic], client_id="reader")
    one = await bus.subscribe([topic], client_id="reader", partitions=[0])
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    await admin.create_partitions({topic: NewPartitions(3)})
    await admin.close()
    with pytest.raises(BusError, match="there are 3 now"):
        async with patience(10):
            while True:
                await everything.poll(timeout_s=0.1)
    assert await one.poll(timeout_s=2) == []
    anew = await bus.subscribe([topic], client_id="reader")
    assert len(anew.partitions()) == 3
    for opened in (everything, one, anew):
        await opened.close()


async def delete(servers: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.delete_topics([topic])
    await admin.close()


async def test_a_topic_deleted_and_made_again_is_refused_by_running_and_new_readers(
    bootstrap_servers: str, bus: KafkaBus, topic: str
) -> None:
    await write(bus, *(Outgoing(topic, b"old", None, 0) for _ in range(5)))
    subscription = await bus.subscribe([topic], client_id="reader")
    await read(subscription, 5)
    await delete(bootstrap_servers, topic)
    await create_topic_again(bootstrap_servers, topic)
    await write(bus, Outgoing(topic, b"new", None, 0))
    with pytest.raises(DataLossRefused, match="offset 5") as refused:
        async with patience(20):
            while True:
                assert await subscription.poll(timeout_s=0.2) == []
    assert refused.value.holes == ((topic, 0, 1, 5),)
    with pytest.raises(DataLossRefused, match="offset 5"):
        await bus.subscribe([topic], client_id="reader", start={TopicPartition(topic, 0): 5})
    await subscription.close()


async def create_topic_again(servers: str, topic: str) -> None:
    """A broker forgets a deleted topic a little later than it says; until then records for it go to the old log."""
    async with patience(20), AIOKafkaConsumer(bootstrap_servers=servers) as consumer:
        while True:
            try:
                await create_topic(servers, topic, 1)
            except Exception:
                await asyncio.sleep(0.2)
            else:
                break
        partition = KafkaPartition(topic, 0)
        while (await consumer.end_offsets([partition]))[partition]:
            await asyncio.sleep(0.02)


async def test_a_deleted_topic_ends_its_reader_with_an_error(bootstrap_servers: str, bus: KafkaBus, topic: str) -> None:
    subscription = await bus.subscribe([topic], client_id="reader")
    await delete(bootstrap_servers, topic)
    with pytest.raises(BusError, match="deleted"):
        async with patience(20):
            while True:
                assert await subscription.poll(timeout_s=0.2) == []
    await subscription.close()


async def test_two_readers_and_two_writers_of_one_client_id_do_not_disturb_each_other(
    bus: KafkaBus, topic: str
) -> None:
    readers = [await bus.subscribe([topic], client_id="same", group_id="same") for _ in range(2)]
    writers = [await bus.publisher("same") for _ in range(2)]
    for n in range(20):
        await writers[n % 2].publish(Outgoing(topic, b"%d" % n, None, 0))
    for reader in readers:
        assert [record.value for record in await read(reader, 20)] == [b"%d" % n for n in range(20)]
    await asyncio.gather(*(reader.close() for reader in readers), *(writer.close() for writer in writers))


@pytest.mark.parametrize("compression", ["gzip", "lz4", "zstd"])
async def test_a_compression_bomb_is_delivered_as_unreadable_and_costs_little_memory(
    bootstrap_servers: str, bus: KafkaBus, topic: str, compression: str
) -> None:
    bomber = AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers, compression_type=compression, max_batch_size=512 * MIB
    )
    await bomber.start()
    await write(bus, Outgoing(topic, b"before", None, 0))
    builder = bomber.create_batch()
    for _ in range(2):
        builder.append(timestamp=None, key=None, value=bytes(64 * MIB), headers=[])
    await write_batch(bomber, topic, builder)
    del builder
    await bomber.stop()
    await write(bus, Outgoing(topic, b"after", None, 0))
    subscription = await bus.subscribe([topic], client_id="reader")
    forget_peak()
    held = memory_kib("VmRSS")
    records = await read(subscription, 4)
    growth_kib = memory_kib("VmHWM") - held
    await subscription.close()
    assert [(record.offset, record.value) for record in records] == [
        (0, b"before"),
        (1, None),
        (2, None),
        (3, b"after"),
    ]
    for record in records[1:3]:
        with pytest.raises(WireError, match="could not read"):
            record.message()
    print(f"\n128 MiB in one {compression} batch: memory grew by {growth_kib / 1024:.1f} MiB")
    assert growth_kib <= 64 << 10
