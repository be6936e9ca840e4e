import asyncio

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, TopicPartition
from tests.progress import within


async def test_commits_are_kept_under_the_name_of_the_group() -> None:
    bus = MemoryBus()
    bus.create_topic("t", 1)
    subscription = await bus.subscribe(["t"], client_id="reader", group_id="trainer")
    await subscription.commit({TopicPartition("t", 0): 3})
    assert bus.committed == {("trainer", TopicPartition("t", 0)): 3}


async def test_creating_a_topic_again_leaves_its_records_alone() -> None:
    bus = MemoryBus()
    bus.create_topic("t", 1)
    await (await bus.publisher("writer")).publish(Outgoing("t", b"x", None))
    bus.create_topic("t", 5)
    assert len(bus.log("t").partitions) == 1
    assert len(bus.log("t").partitions[0]) == 1


async def test_a_waiting_reader_is_woken_by_a_record() -> None:
    bus = MemoryBus()
    bus.create_topic("t", 1)
    subscription = await bus.subscribe(["t"], client_id="reader")
    waiting = asyncio.create_task(subscription.poll(timeout_s=30))
    await asyncio.sleep(0)
    await (await bus.publisher("writer")).publish(Outgoing("t", b"x", None))
    assert [record.value for record in await within(waiting, 1)] == [b"x"]
