"""What transactions do about a bad network and holders that come and go; a broker that dies is in test_broker.py."""

import asyncio

import pytest
from aiokafka import AIOKafkaProducer

from streamrl.bus.kafka.connection import stop
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown, Superseded
from tests.faults.cluster import FaultyCluster
from tests.faults.commits import bus_of, commit_until_known, pair, values_at_the_end
from tests.progress import patience


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
    async with patience(5):
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
    async with patience(15):
        while not (records := await reader.poll(timeout_s=0.5)):
            pass
    assert [record.value for record in records] == [b"later"]
    print(f"\nreaders were held up {loop.time() - began:.1f} s by a dead holder's transaction of 1 s")
    await publisher.close()
    await reader.close()
    await stop(crashed, 0.0)


async def test_a_time_out_at_the_broker_is_no_fence_and_a_newer_holder_is(faulty: FaultyCluster, topic: str) -> None:
    await (await bus_of(faulty).transactional(topic)).close()
    bus = bus_of(faulty, transaction_timeout_s=1.0)
    holder = await bus.transactional(topic)
    reader = await bus.subscribe([topic], client_id="reader", partitions=[0])
    producer = holder._producer
    assert producer is not None
    await producer.begin_transaction()
    await (await producer.send(topic, b"timed out", partition=0))
    async with patience(20):
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
