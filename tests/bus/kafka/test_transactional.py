"""What a commit asks of the broker besides the transaction itself, and what becomes of one that did not end."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError

from streamrl.bus.kafka import connection
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Bus, Outgoing, TopicPartition
from streamrl.schemas.errors import BusError, DeliveryUnknown
from tests.bus.kafka.test_publisher import break_task
from tests.contract.topics import create_topic
from tests.progress import patience


async def test_the_topics_are_asked_for_once_and_not_at_every_commit(
    bootstrap_servers: str, counted: Callable[[], int]
) -> None:
    bus, topic = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers)), "transactional-1"
    await create_topic(bootstrap_servers, topic, 1)
    publisher = await bus.transactional(f"{topic}-writer")
    for number in range(5):
        await publisher.commit([Outgoing(topic, b"%d" % number, None, 0)])
    assert counted() == 1
    with pytest.raises(BusError, match="partition below"):
        await publisher.commit([Outgoing(topic, b"elsewhere", None, 99)])
    with pytest.raises(BusError, match="existing topic"):
        await publisher.commit([Outgoing(f"{topic}-not-there", b"nowhere", None)])
    assert counted() == 2
    await publisher.close()


def pair(topic: str, first: bytes, second: bytes) -> list[Outgoing]:
    return [Outgoing(topic, first, None, 0), Outgoing(topic, second, None, 1)]


async def values_of(bus: Bus, topic: str, last: bytes) -> dict[int, list[bytes | None]]:
    """By partition, until ``last`` was read in both."""
    reader = await bus.subscribe([topic], client_id="reader")
    values: dict[int, list[bytes | None]] = {0: [], 1: []}
    async with patience(15):
        while not all(last in read for read in values.values()):
            for record in await reader.poll(timeout_s=0.2):
                values[record.partition].append(record.value)
    await reader.close()
    return values


async def test_only_committed_records_are_read(bootstrap_servers: str) -> None:
    bus, topic = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers)), "transactional-2"
    await create_topic(bootstrap_servers, topic, 2)
    holder = await bus.transactional(f"{topic}-writer")
    assert holder._producer is not None

    async def lost() -> None:
        raise KafkaConnectionError("the connection broke before the broker was told to commit")

    holder._producer.commit_transaction = lost
    with pytest.raises(DeliveryUnknown):
        await holder.commit(pair(topic, b"told again", b"told again"))
    reader = await bus.subscribe([topic], client_id="early")
    assert await reader.end_offsets() == {TopicPartition(topic, n): 0 for n in (0, 1)}, "an open transaction was shown"
    await holder.commit(pair(topic, b"told again", b"told again"))
    await holder.commit(pair(topic, b"end", b"end"))
    assert await values_of(bus, topic, b"end") == {n: [b"told again", b"end"] for n in (0, 1)}
    await reader.close()
    await holder.close()


async def test_a_transaction_refused_in_one_partition_is_read_in_none(bootstrap_servers: str) -> None:
    settings = KafkaSettings(bootstrap_servers=bootstrap_servers, compression_type="none")
    bus, topic = KafkaBus(settings), "transactional-3"
    await create_topic(bootstrap_servers, topic, 2)
    holder = await bus.transactional(f"{topic}-writer")
    with pytest.raises(BusError, match="MessageSizeTooLarge"):
        await holder.commit(pair(topic, b"half", bytes(18 << 20)))  # one MiB more than the topic takes
    await holder.commit(pair(topic, b"end", b"end"))
    assert await values_of(bus, topic, b"end") == {0: [b"end"], 1: [b"end"]}
    await holder.close()


@pytest.mark.parametrize("task", ["the sender fails", "the sender is cancelled", "metadata fail"])
async def test_a_broken_transactional_producer_is_replaced(bootstrap_servers: str, task: str) -> None:
    bus, topic = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers)), f"transactional-{task.replace(' ', '-')}"
    await create_topic(bootstrap_servers, topic, 2)
    holder = await bus.transactional(f"{topic}-writer")
    first = holder._producer
    assert first is not None
    # Between two commits: nothing is unknown.
    await holder.commit(pair(topic, b"0", b"0"))
    break_task(first, task)
    async with patience(10):
        while not holder._is_broken:
            await asyncio.sleep(0.01)
    await holder.commit(pair(topic, b"1", b"1"))
    second = holder._producer
    assert second is not None
    assert second is not first
    # In the middle of one: unknown, and once it was committed again it is there once. Metadata are not needed any more.
    usual = second.commit_transaction

    async def broken() -> None:
        break_task(second, task)
        while not holder._is_broken:
            await asyncio.sleep(0.01)
        await usual()

    second.commit_transaction = broken
    if task != "metadata fail":
        with pytest.raises(DeliveryUnknown):
            await holder.commit(pair(topic, b"2", b"2"))
    await holder.commit(pair(topic, b"2", b"2"))
    await holder.commit(pair(topic, b"end", b"end"))
    assert holder._producer not in (first, second)
    assert await values_of(bus, topic, b"end") == {n: [b"0", b"1", b"2", b"end"] for n in (0, 1)}
    await holder.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a client asked for the metadata of topics."""
    calls = []
    ask = connection.topics_named

    async def counting(client: AIOKafkaClient, names: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        calls.append(client)
        return await ask(client, names)

    monkeypatch.setattr(connection, "topics_named", counting)
    return lambda: len(calls)
