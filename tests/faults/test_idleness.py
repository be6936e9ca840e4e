"""What the bus does after long idleness, when the broker or something on the way has closed its connections."""

import asyncio

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing
from tests.faults.cluster import FaultyCluster

FIRST_MESSAGE_S = 5.0


async def test_the_first_record_after_idleness_comes_within_five_seconds(faulty: FaultyCluster, topic: str) -> None:
    bus, loop = KafkaBus(KafkaSettings(bootstrap_servers=faulty.bootstrap_servers)), asyncio.get_running_loop()
    publisher, holder = await bus.publisher("idle-writer"), await bus.transactional("idle-holder")
    subscription = await bus.subscribe([topic], client_id="idle-reader")
    await publisher.publish(Outgoing(topic, b"before", None, 0))
    await holder.commit([Outgoing(topic, b"before, committed", None, 0)])
    for _ in range(3):
        faulty.proxy.reset()  # every connection at once, as brokers close idle ones
        assert {record.value for record in await subscription.poll(timeout_s=1.0)} <= {b"before", b"before, committed"}
    before = faulty.proxy.accepted
    began = loop.time()
    await publisher.publish(Outgoing(topic, b"after", None, 0))
    await holder.commit([Outgoing(topic, b"after, committed", None, 0)])
    heard: set[bytes | None] = set()
    while not heard >= {b"after", b"after, committed"} and loop.time() - began < 2 * FIRST_MESSAGE_S:
        heard |= {record.value for record in await subscription.poll(timeout_s=0.2)}
    took_s = loop.time() - began
    print(f"\nfirst records after idleness: {took_s:.2f} s, {faulty.proxy.accepted - before} new connections")
    assert heard >= {b"after", b"after, committed"}
    assert took_s <= FIRST_MESSAGE_S
    await asyncio.gather(publisher.close(), holder.close(), subscription.close())
