import asyncio
import time

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, KafkaTimeoutError

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka import topic_admin
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory
from streamrl.bus.kafka.topic_admin import apply_topics, diff_topics
from streamrl.bus.port import Outgoing
from streamrl.schemas.errors import BrokerError
from streamrl.schemas.topics import CATALOGUE, HEARTBEATS, TRAJECTORIES, UNGRADED
from tests.broker_fixture import unique_numbers
from tests.contract.topics import set_configs
from tests.progress import patience

_numbers = unique_numbers()


@pytest.fixture
def run() -> str:
    return f"topics-{next(_numbers)}"


async def test_applying_creates_everything_and_a_second_time_changes_nothing(bootstrap_servers: str, run: str) -> None:
    planned = await diff_topics(bootstrap_servers, run, 8)
    assert [change.kind for change in planned] == ["create"] * len(CATALOGUE)
    assert await apply_topics(bootstrap_servers, run, 8) == planned
    assert await diff_topics(bootstrap_servers, run, 8) == []
    assert await apply_topics(bootstrap_servers, run, 8) == []


async def test_when_apply_returns_every_topic_takes_records(
    bootstrap_servers: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    await apply_topics(bootstrap_servers, run, 3)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers))
    publisher = await bus.publisher("writer")
    for topic in CATALOGUE:
        last = topic.partition_count(3) - 1
        position = await publisher.publish(Outgoing(topic.full_name(run), b"x", "k", last))
        assert position.partition == last
    await publisher.close()
    assert not [record for record in caplog.records if record.name.startswith("aiokafka")]


async def test_a_writer_s_wrong_clock_neither_refuses_nor_ages_a_record(bootstrap_servers: str, run: str) -> None:
    await apply_topics(bootstrap_servers, run, 1)
    topic, began = TRAJECTORIES.full_name(run), time.time()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap_servers)
    await producer.start()
    for wrong_by_s in (-30 * 86_400, 7200):
        stamp = int(1000 * (began + wrong_by_s))
        await producer.send_and_wait(topic, b"x", partition=0, timestamp_ms=stamp)
    await producer.stop()
    history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers)), "stamps")
    stamps = [record.timestamp async for record in history.records(topic)]
    assert len(stamps) == 2
    # Broker and test share a machine; the stamps are whole milliseconds.
    assert all(began - 0.01 <= stamp <= time.time() for stamp in stamps)


async def test_partitions_are_added_and_never_taken_away(bootstrap_servers: str, run: str) -> None:
    await apply_topics(bootstrap_servers, run, 2)
    grown = await apply_topics(bootstrap_servers, run, 5)
    alike = [topic.full_name(run) for topic in CATALOGUE if topic in (TRAJECTORIES, UNGRADED)]
    assert [str(each) for each in grown] == [f"add partitions: {topic}: 2 → 5" for topic in alike]
    conflicts = await apply_topics(bootstrap_servers, run, 3)
    assert [(each.kind, each.topic) for each in conflicts] == [("conflict", topic) for topic in alike]
    assert await diff_topics(bootstrap_servers, run, 5) == []


async def test_a_setting_that_differs_is_set_back_and_others_are_left_alone(bootstrap_servers: str, run: str) -> None:
    await apply_topics(bootstrap_servers, run, 2)
    name = HEARTBEATS.full_name(run)
    configs = HEARTBEATS.configs(replication_factor=1)
    await set_configs(bootstrap_servers, name, {**configs, "retention.ms": "1", "retention.bytes": "123456789"})
    async with patience(30):  # a busy broker tells of new settings a moment after it took them
        while not await diff_topics(bootstrap_servers, run, 2):
            await asyncio.sleep(0.05)
    (change,) = await apply_topics(bootstrap_servers, run, 2)
    assert (change.kind, change.topic) == ("set", name)
    assert change.detail == f"retention.ms: 1 → {HEARTBEATS.retention_ms}"
    async with patience(30):
        while await diff_topics(bootstrap_servers, run, 2):
            await asyncio.sleep(0.05)
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    await admin.close()
    assert {key: value for key, value, *_ in response.resources[0][4]}["retention.bytes"] == "123456789"


async def test_two_at_once_agree(bootstrap_servers: str, run: str) -> None:
    await asyncio.gather(*(apply_topics(bootstrap_servers, run, 4) for _ in range(3)))
    assert await diff_topics(bootstrap_servers, run, 4) == []


async def test_more_copies_than_brokers_are_refused_before_anything_is_made(bootstrap_servers: str, run: str) -> None:
    with pytest.raises(BrokerError, match="replication_factor"):
        await apply_topics(bootstrap_servers, run, 2, replication_factor=7)
    assert len(await diff_topics(bootstrap_servers, run, 2)) == len(CATALOGUE)


async def test_no_broker_is_one_line() -> None:
    with pytest.raises(BrokerError, match=r"127\.0\.0\.1:1"):
        await apply_topics("127.0.0.1:1", "run", 2)


async def test_a_connection_that_breaks_while_topics_are_made_is_opened_again(
    bootstrap_servers: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = topic_admin._carry_out, list[int]()

    async def breaks_once(admin: AIOKafkaAdminClient, plan: topic_admin._Plan) -> None:
        await real(admin, plan)
        if not broken:
            broken.append(len(plan.changes))
            raise KafkaConnectionError("closed")

    monkeypatch.setattr(topic_admin, "_carry_out", breaks_once)
    assert len(await apply_topics(bootstrap_servers, run, 2)) == broken[0] == len(CATALOGUE)
    assert await diff_topics(bootstrap_servers, run, 2) == []


async def test_leaders_are_waited_for_longer_than_one_request_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Slow:
        async def end_offsets(self, partitions: list[object]) -> None:
            asked.append(len(partitions))
            if len(asked) < 3:
                raise KafkaTimeoutError("Failed to get offsets by times in 15000 ms")

        async def stop(self) -> None:
            pass

    async def open_consumer(*_arguments: object) -> Slow:
        return Slow()

    monkeypatch.setattr(ConsumerFactory, "open_consumer", open_consumer)
    wanted = topic_admin._wanted("r", 4, 1)
    await topic_admin._wait_for_leaders(KafkaSettings(bootstrap_servers="nowhere:1"), wanted)
    assert asked == [sum(each.partitions for each in wanted)] * 3
