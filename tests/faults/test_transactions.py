"""What transactions do about a bad network, a broker that dies in one, and holders that come and go."""

import asyncio

import pytest
from aiokafka import AIOKafkaProducer

from bus.kafka.bus import KafkaBus
from bus.kafka.connection import stop
from bus.kafka.settings import KafkaSettings
from bus.port import Bus, Outgoing, TopicPartition, TransactionalPublisher
from schemas.errors import BusUnavailable, DeliveryUnknown, Superseded
from tests.faults.cluster import FaultyCluster

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def bus_of(faulty: FaultyCluster, **changes: object) -> KafkaBus:
    values = {"bootstrap_servers": faulty.bootstrap_servers, "request_timeout_ms": 2_000, "connect_timeout_ms": 1_500}
    return KafkaBus(KafkaSettings.model_validate({**values, "transaction_timeout_ms": 5_000, **changes}))


async def commit_until_known(holder: TransactionalPublisher, records: list[Outgoing]) -> int:
    """How often it had to be tried."""
    async with asyncio.timeout(40):
        for attempt in range(1, 100):
            try:
                await holder.commit(records)
            except (DeliveryUnknown, BusUnavailable):
                await asyncio.sleep(0.2)
            else:
                return attempt
    raise AssertionError("never known")


async def values_at_the_end(bus: Bus, topic: str, last: bytes) -> dict[int, list[bytes]]:
    """By partition, until ``last`` was read in each."""
    reader = await bus.subscribe([topic], client_id="reader")
    values: dict[int, list[bytes]] = {0: [], 1: []}
    async with asyncio.timeout(30):
        while not all(read and read[-1] == last for read in values.values()):
            for record in await reader.poll(timeout_s=0.2):
                values[record.partition].append(record.value or b"")
    await reader.close()
    return values


def pair(topic: str, value: bytes) -> list[Outgoing]:
    return [Outgoing(topic, value, "k", 0), Outgoing(topic, value, "k", 1)]


@pytest.mark.parametrize("fault", ["half open", "answers lost", "reset"])
async def test_a_commit_through_a_bad_network_is_unknown_in_time_and_repeating_it_is_safe(
    faulty: FaultyCluster, topic: str, fault: str
) -> None:
    bus, loop = bus_of(faulty), asyncio.get_running_loop()
    holder = await bus.transactional(topic)
    await holder.commit(pair(topic, b"before"))
    if fault == "reset":
        faulty.proxy.refuse()
    elif fault == "half open":
        faulty.proxy.half_open()
    else:
        faulty.proxy.blackhole("to_client")
    began = loop.time()
    with pytest.raises((DeliveryUnknown, BusUnavailable)):
        await holder.commit(pair(topic, b"repeated"))
    assert loop.time() - began < 10
    faulty.proxy.heal()
    await commit_until_known(holder, pair(topic, b"repeated"))
    await holder.commit(pair(topic, b"after"))
    values = await values_at_the_end(bus, topic, b"after")
    assert values[0] == values[1], "a transaction was seen in part"
    assert values[0] in ([b"before", b"repeated", b"after"], [b"before", b"repeated", b"repeated", b"after"])
    await holder.close()


async def test_a_broker_killed_in_the_middle_of_transactions_leaves_each_whole(
    faulty: FaultyCluster, topic: str
) -> None:
    bus, count = bus_of(faulty), 1_000
    holder = await bus.transactional(topic)
    again: set[bytes] = set()

    async def commit_all() -> None:
        for n in range(count):
            if await commit_until_known(holder, pair(topic, b"%d" % n)) > 1:
                again.add(b"%d" % n)

    committing = asyncio.create_task(commit_all())
    try:
        for away_s in (0.0, 6.0):  # the second outage outlasts a transaction's deadline, so that one is repeated
            await asyncio.sleep(1.0)
            faulty.cluster.kill_node(0)
            assert not committing.done(), "expected the broker to die while commits are under way"
            await asyncio.sleep(away_s)
            await asyncio.to_thread(faulty.cluster.restart_node, 0)
        await asyncio.wait_for(committing, 60)
        await holder.commit(pair(topic, b"end"))
    finally:
        committing.cancel()
        await asyncio.wait([committing])
        await holder.close()
    values = await values_at_the_end(bus, topic, b"end")
    assert values[0] == values[1]
    assert list(dict.fromkeys(values[0])) == [*(b"%d" % n for n in range(count)), b"end"]
    assert {value for value in values[0] if values[0].count(value) > 1} <= again
    assert again


async def test_an_open_transaction_is_never_read_and_holds_readers_up_until_the_next_holder_opens(
    faulty: FaultyCluster, topic: str
) -> None:
    bus = bus_of(faulty)
    crashed = await open_transaction(faulty, topic, timeout_ms=60_000)
    publisher, reader = await bus.publisher("writer"), await bus.subscribe([topic], client_id="reader")
    await publisher.publish(Outgoing(topic, b"later", None, 0))
    assert await reader.poll(timeout_s=1.0) == []
    assert await reader.end_offsets() == {TopicPartition(topic, 0): 0, TopicPartition(topic, 1): 0}
    holder = await bus.transactional(topic)
    async with asyncio.timeout(5):
        while not (records := await reader.poll(timeout_s=0.2)):
            pass
    assert [(record.offset, record.value) for record in records] == [(1, b"later")]
    for opened in (holder, publisher, reader):
        await opened.close()
    await stop(crashed, 0.0)


async def test_a_dead_holders_transaction_holds_readers_up_no_longer_than_its_time_out(
    faulty: FaultyCluster, topic: str
) -> None:
    bus, loop = bus_of(faulty), asyncio.get_running_loop()
    crashed = await open_transaction(faulty, topic, timeout_ms=1_000)
    publisher, reader = await bus.publisher("writer"), await bus.subscribe([topic], client_id="reader")
    began = loop.time()
    await publisher.publish(Outgoing(topic, b"later", None, 0))
    async with asyncio.timeout(15):
        while not (records := await reader.poll(timeout_s=0.5)):
            pass
    assert [record.value for record in records] == [b"later"]
    print(f"\nreaders were held up {loop.time() - began:.1f} s by a dead holder's transaction of 1 s")
    await publisher.close()
    await reader.close()
    await stop(crashed, 0.0)


async def test_a_time_out_at_the_broker_is_no_fence_and_a_newer_holder_is(faulty: FaultyCluster, topic: str) -> None:
    await (await bus_of(faulty).transactional(topic)).close()
    bus = bus_of(faulty, transaction_timeout_ms=1_000)
    holder = await bus.transactional(topic)
    reader = await bus.subscribe([topic], client_id="reader", partitions=[0])
    producer = holder._producer
    assert producer is not None
    await producer.begin_transaction()
    await (await producer.send(topic, b"timed out", partition=0))
    async with asyncio.timeout(20):
        while (await reader.end_offsets())[TopicPartition(topic, 0)] == 0:  # until the broker aborts it
            await asyncio.sleep(0.2)
    producer._txn_manager.state = type(producer._txn_manager.state).READY
    with pytest.raises(DeliveryUnknown, match="timed out at the broker"):
        await holder.commit(pair(topic, b"first try"))
    await holder.commit(pair(topic, b"second try"))
    newer = await bus.transactional(topic)
    with pytest.raises(Superseded):
        await holder.commit(pair(topic, b"zombie"))
    await newer.commit(pair(topic, b"end"))
    assert (await values_at_the_end(bus, topic, b"end"))[0] == [b"second try", b"end"]
    for opened in (holder, newer, reader):
        await opened.close()


async def test_a_zombie_whose_producer_was_discarded_does_not_fence_its_successor(
    faulty: FaultyCluster, topic: str
) -> None:
    bus = bus_of(faulty)
    zombie = await bus.transactional(topic)
    faulty.proxy.half_open()
    with pytest.raises((DeliveryUnknown, BusUnavailable)):
        await zombie.commit(pair(topic, b"zombie"))
    faulty.proxy.heal()
    successor = await bus.transactional(topic)
    for _ in range(2):
        with pytest.raises(Superseded):
            await zombie.commit(pair(topic, b"zombie"))
    await successor.commit(pair(topic, b"end"))
    assert await values_at_the_end(bus, topic, b"end") == {0: [b"end"], 1: [b"end"]}
    await zombie.close()
    await successor.close()


async def open_transaction(faulty: FaultyCluster, topic: str, timeout_ms: int) -> AIOKafkaProducer:
    """As a trainer leaves it that dies between its records and its commit."""
    producer = AIOKafkaProducer(
        bootstrap_servers=faulty.bootstrap_servers, transactional_id=topic, transaction_timeout_ms=timeout_ms
    )
    await producer.start()
    await producer.begin_transaction()
    await (await producer.send(topic, b"never", partition=0))
    return producer
