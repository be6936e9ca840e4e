import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from structlog.testing import capture_logs

from streamrl.bus.embedded.cluster import Cluster, start_cluster
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.publisher import REQUESTS_PER_DELIVERY
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, Position, Record
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown
from tests.broker_fixture import unique_numbers
from tests.contract.topics import create_topic, new_topic
from tests.progress import patience, within

_numbers = unique_numbers()


@pytest.fixture
async def topic(bootstrap_servers: str) -> str:
    return await new_topic(bootstrap_servers, "publisher", 2)


REQUEST_MS = 2000
DELIVERY_S = REQUESTS_PER_DELIVERY * REQUEST_MS / 1000
"""Of those who send while the broker is away; what they send before has to arrive in it, on a busy machine too."""


def settings(servers: str, **changes: object) -> KafkaSettings:
    return KafkaSettings.model_validate({"bootstrap_servers": servers, **changes})


async def values_of(bus: KafkaBus, topic: str, count: int) -> list[bytes | None]:
    subscription = await bus.subscribe([topic], client_id="reader", partitions=[0])
    values: list[bytes | None] = []
    async with patience(15):
        while len(values) < count:
            values += [record.value for record in await subscription.poll(timeout_s=0.2)]
    values += [record.value for record in await subscription.poll(timeout_s=0.3)]
    await subscription.close()
    return values


async def test_a_refused_record_fails_alone_and_the_next_ones_arrive(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(settings(bootstrap_servers))
    publisher = await bus.publisher("writer")
    before = await publisher.submit(Outgoing(topic, b"before", None, 0))
    refused = await publisher.submit(Outgoing(topic, os.urandom(18 << 20), None, 0))
    after = [await publisher.submit(Outgoing(topic, b"after", None, 0)) for _ in range(3)]
    with pytest.raises(BusError, match="refused"):
        await refused
    assert not isinstance(refused.exception(), DeliveryUnknown)
    assert [await future for future in (before, *after)] == [Position(topic, 0, n) for n in range(4)]
    await publisher.close()
    assert await values_of(bus, topic, 4) == [b"before", b"after", b"after", b"after"]


async def test_bytes_in_flight_are_bounded(bootstrap_servers: str, topic: str) -> None:
    publisher = await KafkaBus(settings(bootstrap_servers), limits=ClientLimits(max_in_flight_bytes=1 << 20)).publisher(
        "writer"
    )
    futures = []
    for _ in range(64):
        futures.append(await publisher.submit(Outgoing(topic, bytes(200_000), None, 0)))
        assert sum(not future.done() for future in futures) <= 6
    assert [(await future).offset for future in futures] == list(range(64))
    await publisher.close()


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_every_compression_can_be_read_back(bootstrap_servers: str, topic: str, compression: str) -> None:
    bus = KafkaBus(settings(bootstrap_servers, compression_type=compression))
    publisher = await bus.publisher("writer")
    for n in range(3):
        await publisher.submit(Outgoing(topic, b"%d" % n * 1000, None, 0))
    await publisher.close()
    assert await values_of(bus, topic, 3) == [b"%d" % n * 1000 for n in range(3)]


async def never(*_request: object, **_how: object) -> None:
    """What a request to a broker comes to whose answer is lost."""
    await asyncio.Event().wait()


async def test_a_producer_that_gets_nothing_acknowledged_is_replaced(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(settings(bootstrap_servers, request_timeout_ms=1000), limits=ClientLimits(stall_timeout_s=0.5))
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    stuck = publisher._producer
    assert stuck is not None
    stuck.client.send = never
    with pytest.raises(DeliveryUnknown, match="nothing acknowledged"):
        await publisher.publish(Outgoing(topic, b"1", None, 0))
    await publisher.publish(Outgoing(topic, b"1", None, 0))
    assert publisher._producer is not stuck
    await publisher.close()
    assert await values_of(bus, topic, 2) == [b"0", b"1"]


async def test_a_publisher_that_no_new_producer_helps_refuses_with_an_error(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(
        settings(bootstrap_servers, request_timeout_ms=1000),
        limits=ClientLimits(stall_timeout_s=0.5, max_client_restarts=2),
    )
    publisher = await bus.publisher("writer")
    usual = publisher._connect

    async def without_a_sender() -> AIOKafkaProducer:
        producer = await usual()
        await producer.partitions_for(topic)
        producer.client.send = never
        return producer

    publisher._connect, first = without_a_sender, publisher._producer
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    assert first is not None
    first.client.send = never
    for _ in range(2):
        with pytest.raises(DeliveryUnknown):
            await publisher.publish(Outgoing(topic, b"1", None, 0))
    with pytest.raises(BusError, match="2 producers in a row"):
        await publisher.publish(Outgoing(topic, b"1", None, 0))
    await publisher.close()


async def fail() -> None:
    raise ZeroDivisionError("a mistake in the library")


def break_task(producer: AIOKafkaProducer, task: str) -> None:
    """End one of the tasks that a producer works by."""
    match task:
        case "the sender fails":
            producer._sender._maybe_wait_for_pid = fail
            producer._sender._message_accumulator.waiter().set_result(None)
        case "the sender is cancelled":
            # Twice, as it waits for its requests after the first time.
            asyncio.get_running_loop().call_soon(producer._sender.sender_task.cancel)
            asyncio.get_running_loop().call_later(0.01, producer._sender.sender_task.cancel)
        case "metadata fail":
            producer.client._metadata_update = lambda *_: fail()
            producer.client.force_metadata_update()


@pytest.mark.parametrize("task", ["the sender fails", "the sender is cancelled", "metadata fail"])
async def test_a_broken_producer_is_replaced(bootstrap_servers: str, topic: str, task: str) -> None:
    bus = KafkaBus(settings(bootstrap_servers))
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    broken = publisher._producer
    assert broken is not None
    usual, broken.client.send = broken.client.send, never
    on_its_way = await publisher.submit(Outgoing(topic, b"lost", None, 0))
    async with patience(15):  # half of the delivery deadline, and of the time after which it would be stuck
        while not broken._message_accumulator._pending_batches:
            await asyncio.sleep(0.01)
        behind = await publisher.submit(Outgoing(topic, b"1", None, 0))
        broken.client.send = usual
        with capture_logs() as said:
            break_task(broken, task)
            with pytest.raises(DeliveryUnknown):
                await on_its_way
            # It had not been handed over, so it goes out with the new producer.
            assert await behind == Position(topic, 0, 1)
        await publisher.publish(Outgoing(topic, b"2", None, 0))
    assert publisher._producer is not broken
    assert publisher._stalls == 0
    assert (task == "the sender is cancelled") == ("a producer broke" not in str(said))
    assert "new producer" in str(said)
    await publisher.close()
    assert await values_of(bus, topic, 3) == [b"0", b"1", b"2"]


async def test_a_mistake_of_the_library_fails_its_batch_and_ends_no_queue(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(settings(bootstrap_servers))
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    assert publisher._producer is not None
    publisher._producer.send_batch = lambda *_, **__: fail()
    async with patience(15):
        refused = await publisher.submit(Outgoing(topic, b"lost", None, 0))
        await asyncio.sleep(0.1)  # longer than a record lingers
        assert await (await publisher.submit(Outgoing(topic, b"1", None, 0))) == Position(topic, 0, 1)
        with pytest.raises(DeliveryUnknown, match="a mistake in the library"):
            await refused
    await publisher.close()


async def test_a_send_that_waits_for_metadata_in_vain_is_unknown(bootstrap_servers: str, topic: str) -> None:
    bus = KafkaBus(settings(bootstrap_servers, request_timeout_ms=1000), limits=ClientLimits(stall_timeout_s=0.5))
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    assert publisher._producer is not None
    publisher._producer.send_batch = never
    async with patience(15):
        with pytest.raises(DeliveryUnknown):
            await publisher.publish(Outgoing(topic, b"1", None, 0))
        assert await publisher.publish(Outgoing(topic, b"1", None, 0)) == Position(topic, 0, 1)
    await publisher.close()


async def test_a_send_whose_partition_loses_its_leader_is_unknown(bootstrap_servers: str, topic: str) -> None:
    """It may have been sent before the leader was lost."""
    bus = KafkaBus(settings(bootstrap_servers, request_timeout_ms=1000))
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    assert publisher._producer is not None
    publisher._producer.client.cluster.leader_for_partition = lambda *_: None
    async with patience(15):
        with pytest.raises(DeliveryUnknown, match="no leader"):
            await publisher.publish(Outgoing(topic, b"1", None, 0))
        assert await publisher.publish(Outgoing(topic, b"1", None, 0)) == Position(topic, 0, 1)
    await publisher.close()


class Outage:
    """One outage for several who use a broker: it begins, and ends, when all of them have come to that."""

    def __init__(self, cluster: Cluster, users: int) -> None:
        self._cluster, self._together = cluster, asyncio.Barrier(users)
        self.servers = cluster.bootstrap_servers

    async def begins(self) -> None:
        await self._once(self._cluster.kill_node)

    async def ends(self) -> None:
        await self._once(self._cluster.restart_node)

    async def _once(self, act: Callable[[int], None]) -> None:
        if await self._together.wait() == 0:
            await asyncio.to_thread(act, 0)
        await self._together.wait()


@pytest.mark.processes
async def test_while_the_broker_is_away_all_calls_end_in_time_and_once_it_is_back_they_go_on(tmp_path: Path) -> None:
    """Each of the functions below holds one promise, on a topic of its own."""
    users = (
        a_send_past_its_deadline_is_unknown_and_still_arrives_in_order,
        buffer_space_runs_out_within_the_deadline,
        close_is_bounded,
        a_reader_goes_on,
    )
    with await asyncio.to_thread(start_cluster, tmp_path, heap_mb=256) as cluster:
        outage = Outage(cluster, len(users))
        for user in users:
            await create_topic(outage.servers, user.__name__, 2)
        async with asyncio.TaskGroup() as group:  # if one fails, the others wait for it no longer
            for user in users:
                group.create_task(user(outage, user.__name__))


async def a_send_past_its_deadline_is_unknown_and_still_arrives_in_order(outage: Outage, topic: str) -> None:
    bus = KafkaBus(settings(outage.servers, request_timeout_ms=REQUEST_MS))
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    await outage.begins()
    lost = await publisher.submit(Outgoing(topic, b"1", None, 0))
    with pytest.raises(DeliveryUnknown, match="same ids"):
        await within(lost, DELIVERY_S + 2)
    await outage.ends()
    async with patience(20):
        while True:
            try:
                await publisher.publish(Outgoing(topic, b"2", None, 0))
                break
            except BusError:
                await asyncio.sleep(0.1)
    await publisher.close()
    values = await values_of(bus, topic, 3)
    assert values[:2] == [b"0", b"1"]
    assert set(values[2:]) == {b"2"}


async def buffer_space_runs_out_within_the_deadline(outage: Outage, topic: str) -> None:
    bus = KafkaBus(
        settings(outage.servers, request_timeout_ms=REQUEST_MS), limits=ClientLimits(max_in_flight_bytes=1 << 20)
    )
    publisher = await bus.publisher("writer")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    await outage.begins()
    futures = [await publisher.submit(Outgoing(topic, bytes(500_000), None, 0))]
    await asyncio.sleep(0.2)
    with pytest.raises(BusUnavailable, match="buffer space"):
        async with patience(10):
            while True:
                futures.append(await publisher.submit(Outgoing(topic, bytes(700_000), None, 0)))
    for future in futures:
        with pytest.raises(BusError):
            await within(future, DELIVERY_S + 2)
    await within(publisher.close(), 10)
    await outage.ends()


async def close_is_bounded(outage: Outage, topic: str) -> None:
    bus = KafkaBus(settings(outage.servers, request_timeout_ms=REQUEST_MS))
    publisher, subscription = await bus.publisher("writer"), await bus.subscribe([topic], client_id="reader")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    await outage.begins()
    future = await publisher.submit(Outgoing(topic, b"1", None, 0))
    await within(asyncio.gather(publisher.close(), subscription.close()), 10)
    with pytest.raises(DeliveryUnknown):
        await future
    await outage.ends()


async def a_reader_goes_on(outage: Outage, topic: str) -> None:
    bus = KafkaBus(settings(outage.servers, request_timeout_ms=2000))
    publisher, subscription = await bus.publisher("writer"), await bus.subscribe([topic], client_id="reader")
    await publisher.publish(Outgoing(topic, b"0", None, 0))
    assert [record.value for record in await subscription.poll(timeout_s=5)] == [b"0"]
    await outage.begins()
    assert await subscription.poll(timeout_s=0.5) == []
    await outage.ends()
    await publisher.publish(Outgoing(topic, b"1", None, 0))
    records: list[Record] = []
    async with patience(20):
        while not records:
            records = await subscription.poll(timeout_s=0.5)
    assert [record.value for record in records] == [b"1"]
    await publisher.close()
    await subscription.close()
