import asyncio
import gc

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing
from tests.broker_fixture import unique_numbers
from tests.contract.topics import new_topic
from tests.fuzz.targets import memory_kib

_numbers = unique_numbers()
POLLS = 4000


async def test_thousands_of_empty_polls_leave_no_memory_behind(bootstrap_servers: str) -> None:
    topic = await new_topic(bootstrap_servers, "idle", 2)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers), limits=ClientLimits(fetch_max_wait_ms=2))
    subscription = await bus.subscribe([topic], client_id="reader")
    waiters = subscription._consumer._fetcher._fetch_waiters
    for _ in range(500):
        await subscription.poll(timeout_s=0.001)
    gc.collect()
    before_kib, before_tasks = memory_kib("VmRSS"), len(asyncio.all_tasks())
    for _ in range(POLLS):
        assert await subscription.poll(timeout_s=0.001) == []
    gc.collect()
    grown_kib = memory_kib("VmRSS") - before_kib
    await asyncio.sleep(0)
    print(f"\n{POLLS} empty polls: {len(waiters)} waiters, memory grew by {grown_kib} KiB")
    assert len(waiters) <= 1
    assert len(asyncio.all_tasks()) <= before_tasks + 1
    assert grown_kib < 4096
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"at last", None, 0))
    records = await subscription.poll(timeout_s=5)
    assert [record.value for record in records] == [b"at last"]
    await publisher.close()
    await subscription.close()
