"""What the bus does about a bad network between it and a real broker."""

import asyncio

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing
from tests.faults.cluster import FaultyCluster
from tests.faults.traffic import Traffic, check

REQUEST_TIMEOUT_S = 3.0
BACKOFF_S = 3.0
"""Longest that reconnecting takes besides: a batch's own retries, metadata, and one tick of a poll."""


def settings(faulty: FaultyCluster, **changes: object) -> KafkaSettings:
    values = {"bootstrap_servers": faulty.bootstrap_servers, "request_timeout_ms": int(REQUEST_TIMEOUT_S * 1000)}
    return KafkaSettings.model_validate({**values, **changes})


async def test_a_half_open_connection_is_noticed_within_the_request_timeout_and_heals(
    faulty: FaultyCluster, topic: str
) -> None:
    loop = asyncio.get_running_loop()
    traffic = Traffic(KafkaBus(settings(faulty)), topic)
    await traffic.start()
    await traffic.flowing_after(loop.time(), 10)
    faulty.proxy.half_open()
    before = faulty.proxy.accepted
    began = loop.time()
    async with asyncio.timeout(REQUEST_TIMEOUT_S + BACKOFF_S):
        while faulty.proxy.accepted == before:  # somebody gave the dead connection up and tries a new one
            await asyncio.sleep(0.05)
    noticed_s = loop.time() - began
    faulty.proxy.heal()
    healed_s = await traffic.flowing_after(loop.time(), REQUEST_TIMEOUT_S + BACKOFF_S + 5)
    await traffic.finish()
    check(traffic)
    print(f"\nhalf-open: noticed after {noticed_s:.1f} s, flowing {healed_s:.1f} s after healing")
    assert healed_s <= REQUEST_TIMEOUT_S + BACKOFF_S


@pytest.mark.parametrize("direction", ["to_target", "to_client"])
async def test_bytes_lost_in_one_direction_lose_no_record(faulty: FaultyCluster, topic: str, direction: str) -> None:
    loop = asyncio.get_running_loop()
    traffic = Traffic(KafkaBus(settings(faulty)), topic)
    await traffic.start()
    await traffic.flowing_after(loop.time(), 10)
    faulty.proxy.blackhole("to_client" if direction == "to_client" else "to_target")
    await asyncio.sleep(REQUEST_TIMEOUT_S + 1)
    faulty.proxy.heal()
    await traffic.flowing_after(loop.time(), REQUEST_TIMEOUT_S + BACKOFF_S + 5)
    await traffic.finish()
    check(traffic)
    assert faulty.proxy.swallowed["to_client" if direction == "to_client" else "to_target"] > 0


async def test_latency_and_little_bandwidth_are_slower_and_nothing_else(faulty: FaultyCluster, topic: str) -> None:
    bus = KafkaBus(settings(faulty, request_timeout_ms=15_000), limits=ClientLimits(stall_timeout_s=4.0))
    publisher, subscription = await bus.publisher("writer"), await bus.subscribe([topic], client_id="reader")
    consumer, producer = subscription._consumer, publisher._producer
    faulty.proxy.latency_s, faulty.proxy.bandwidth = 0.25, 1_000_000
    count, size, loop = 60, 50_000, asyncio.get_running_loop()
    began = loop.time()
    futures = [await publisher.submit(Outgoing(topic, b"%d " % n + bytes(size), None, 0)) for n in range(count)]
    values: list[int] = []
    async with asyncio.timeout(60):
        while len(values) < count:
            records = await subscription.poll(timeout_s=0.5)
            values += [int((record.value or b"").split(b" ")[0]) for record in records]
    took_s = loop.time() - began
    assert values == list(range(count))
    assert [(await future).offset for future in futures] == values
    assert (subscription._consumer, publisher._producer) == (consumer, producer), "slow was taken for stuck"
    print(f"\n3 MB there and back at 1 MB/s and 0.5 s: {took_s:.1f} s")
    assert took_s >= count * size / 1_000_000
    faulty.proxy.heal()
    await publisher.close()
    await subscription.close()


async def test_connections_reset_in_the_middle_lose_nothing_and_write_nothing_twice(
    faulty: FaultyCluster, topic: str
) -> None:
    traffic = Traffic(KafkaBus(settings(faulty)), topic, size=20_000, pause_s=0.0)
    await traffic.start()
    for n in range(25):
        await asyncio.sleep(0.07 + 0.013 * (n % 5))
        faulty.proxy.reset()
    await traffic.flowing_after(asyncio.get_running_loop().time(), 15)
    await traffic.finish()
    check(traffic)
    assert not traffic.sent_again
    assert len(traffic.read) == len(traffic.written) > 10  # fewer where other tests keep the processors busy


async def test_a_broker_cut_off_for_a_while_is_found_again(faulty: FaultyCluster, topic: str) -> None:
    loop = asyncio.get_running_loop()
    traffic = Traffic(KafkaBus(settings(faulty)), topic)
    await traffic.start()
    await traffic.flowing_after(loop.time(), 10)
    await faulty.proxy.cut(3.0)
    flowing_s = await traffic.flowing_after(loop.time(), 15)
    await traffic.finish()
    check(traffic)
    print(f"\ncut for 3 s: flowing {flowing_s:.1f} s after it")
