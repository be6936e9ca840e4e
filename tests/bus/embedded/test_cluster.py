"""Real brokers, real clients: what is written is read back, also after a node is killed."""

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from streamrl.bus.embedded.cluster import Cluster, plan, start_cluster
from streamrl.bus.embedded.node import START_TIMEOUT_S, PortTaken, live_brokers
from streamrl.bus.embedded.process import ProcessId, _started
from streamrl.bus.embedded.runtime import prepare
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Record
from streamrl.schemas.errors import BrokerError, WireError
from tests.progress import calm_s, patience

pytestmark = pytest.mark.processes


async def create_topic(servers: str, topic: str, replicas: int = 1) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, replicas)])
        while any(not each["partitions"] or each["error_code"] for each in await admin.describe_topics([topic])):
            await asyncio.sleep(0.05)
    finally:
        await admin.close()


async def write(servers: str, topic: str, values: list[bytes]) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=servers, enable_idempotence=True, max_request_size=64 << 20, retry_backoff_ms=50
    )
    await producer.start()
    try:
        async with patience(30):
            for value in values:
                await producer.send_and_wait(topic, value)
    finally:
        await producer.stop()


async def read(servers: str, topic: str, count: int) -> list[bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest", fetch_max_bytes=64 << 20)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        async with patience(30):
            return [(await consumer.getone()).value for _ in range(count)]
    finally:
        await consumer.stop()


async def test_a_large_record_makes_the_round_trip(bootstrap_servers: str) -> None:
    topic = f"round-trip-{os.getpid()}"
    await create_topic(bootstrap_servers, topic)
    values = [b"small", os.urandom(20 << 20)]
    await write(bootstrap_servers, topic, values)
    assert await read(bootstrap_servers, topic, 2) == values


async def test_transactions_and_consumer_groups_work_at_once(bootstrap_servers: str) -> None:
    topic = f"transactions-{os.getpid()}"
    await create_topic(bootstrap_servers, topic)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap_servers, transactional_id=topic)
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap_servers,
        group_id=topic,
        session_timeout_ms=1000,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    async with patience(20):
        await producer.start()
        await consumer.start()
        try:
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"dropped")
            await producer.abort_transaction()
            async with producer.transaction():
                await producer.send_and_wait(topic, b"kept")
            assert (await consumer.getone()).value == b"kept"
        finally:
            await consumer.stop()
            await producer.stop()


async def test_topics_are_not_created_by_mistake(bootstrap_servers: str) -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap_servers)
    await consumer.start()
    try:
        consumer.assign([TopicPartition("a-typing-mistake", 0)])
        await asyncio.sleep(0.2)
        assert "a-typing-mistake" not in await consumer.topics()
    finally:
        await consumer.stop()


async def test_a_node_keeps_its_records_when_it_is_killed_stopped_damaged_and_started(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    """The functions below hold one promise each, on one folder: each start of a node takes seconds.

    One of them is that it takes no more, where another was started before, on a slow machine too.
    """
    began = calm_s()
    with start_cluster(tmp_path) as cluster:
        assert calm_s() - began < 15
        await create_topic(cluster.bootstrap_servers, "kept")
        await write(cluster.bootstrap_servers, "kept", [b"before"])
        await no_other_node_runs_on_its_data(cluster, tmp_path)
        a_port_that_another_node_took_first_is_told_apart_from_serving(cluster, tmp_path / "other")
        await a_killed_node_comes_back_with_its_records_on_its_port(cluster)
        await create_topic(cluster.bootstrap_servers, "damaged")
        await write(cluster.bootstrap_servers, "damaged", [b"value-0", b"value-1", b"value-2"])
    assert not cluster.processes[0].alive()
    with pytest.raises(BrokerError, match=r"cluster of 1 node\(s\), not 3"):
        start_cluster(tmp_path, nodes=3)
    (segment,) = tmp_path.glob("node-1/data/damaged-0/*.log")
    segment.write_bytes(segment.read_bytes().replace(b"value-1", b"vilue-1"))
    with start_cluster(tmp_path) as cluster:
        assert await read(cluster.bootstrap_servers, "kept", 2) == [b"before", b"after"], "of the one that was stopped"
        await damaged_bytes_are_delivered_as_unreadable_and_the_next_ones_follow(cluster)
    a_node_that_does_not_start_says_why_and_leaves_nothing_running(tmp_path)


async def no_other_node_runs_on_its_data(cluster: Cluster, folder: Path) -> None:
    before = (folder / "node-1" / "server.properties").read_text()
    with pytest.raises(BrokerError, match="already runs on the data"):
        await asyncio.to_thread(start_cluster, folder)
    assert (folder / "node-1" / "server.properties").read_text() == before
    assert live_brokers(cluster.specs[0].port).ids == {1}


def a_port_that_another_node_took_first_is_told_apart_from_serving(cluster: Cluster, folder: Path) -> None:
    (spec,) = plan(folder, 1, None)
    # A node of the same id answers there all the while that ours starts.
    clash = replace(spec, port=cluster.specs[0].port)
    with pytest.raises(PortTaken):
        Cluster((clash,), prepare(lambda line: None), heap_mb=256, detached=False).start()


async def a_killed_node_comes_back_with_its_records_on_its_port(cluster: Cluster) -> None:
    servers, (pid,) = cluster.bootstrap_servers, cluster.pids
    cluster.kill_node(0)
    assert not cluster.processes[0].alive()
    with pytest.raises(OSError):
        live_brokers(cluster.specs[0].port)
    await asyncio.to_thread(cluster.restart_node, 0)
    assert cluster.bootstrap_servers == servers
    assert cluster.pids != (pid,)
    await write(servers, "kept", [b"after"])
    assert await read(servers, "kept", 2) == [b"before", b"after"]
    with pytest.raises(BrokerError, match="still runs"):
        cluster.restart_node(0)


async def damaged_bytes_are_delivered_as_unreadable_and_the_next_ones_follow(cluster: Cluster) -> None:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
    subscription, records = await bus.subscribe(["damaged"], client_id="reader"), list[Record]()
    async with patience(20):
        while len(records) < 3:
            records += await subscription.poll(timeout_s=0.2)
    await subscription.close()
    assert [record.value for record in records] == [b"value-0", None, b"value-2"]
    with pytest.raises(WireError, match="checksum"):
        records[1].message()


def a_node_that_does_not_start_says_why_and_leaves_nothing_running(folder: Path) -> None:
    meta = folder / "node-1" / "data" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=9"))
    with pytest.raises(BrokerError, match=r"ended while starting: .*Exception.* 9 .*server\.log") as caught:
        start_cluster(folder)
    assert "\n" not in str(caught.value)


async def test_three_nodes_replicate_and_survive_the_loss_of_one(tmp_path: Path) -> None:
    with start_cluster(tmp_path, nodes=3, heap_mb=256) as cluster:
        servers = cluster.bootstrap_servers
        await create_topic(servers, "replicated", replicas=3)
        admin = AIOKafkaAdminClient(bootstrap_servers=servers)
        await admin.start()
        topic = ConfigResource(ConfigResourceType.TOPIC, "replicated")
        partitions: list[dict[str, Any]] = []
        settings: dict[str, str] = {}
        try:
            async with patience(20):
                # Each request may go to another node, which may not know the new topic yet.
                while not (partitions and settings):
                    partitions = (await admin.describe_topics(["replicated"]))[0]["partitions"]
                    (described,) = await admin.describe_configs([topic])
                    settings = {entry[0]: entry[1] for entry in described.resources[0][4]}
        finally:
            await admin.close()
        (partition,) = partitions
        assert sorted(partition["replicas"]) == [1, 2, 3]
        assert settings["min.insync.replicas"] == "2"
        await write(servers, "replicated", [b"one"])
        leader = partition["leader"] - 1
        cluster.kill_node(leader)
        await write(servers, "replicated", [b"two"])
        await asyncio.to_thread(cluster.restart_node, leader)
        assert await read(servers, "replicated", 2) == [b"one", b"two"]


def test_a_node_that_ends_during_the_start_is_reported_at_once(tmp_path: Path) -> None:
    specs = plan(tmp_path, 3, None)
    cluster = Cluster(specs, prepare(lambda line: None), heap_mb=256, detached=False)
    began = calm_s()
    # Who listens there answers the other nodes' connections, so that they have nothing to complain of either.
    with socket.create_server(("127.0.0.1", specs[2].controller_port)), pytest.raises(PortTaken, match="node 3 ended"):
        cluster.start()
    assert calm_s() - began < START_TIMEOUT_S / 2
    assert not any(process.alive() for process in cluster.processes)


def test_a_folder_with_a_comma_is_refused_and_not_taken_for_two(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="without a comma"):
        start_cluster(tmp_path / "one, two")
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BrokerError, match=f"127.0.0.1:{port}, the port is in use"):
            start_cluster(tmp_path, port=port)


def test_the_broker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from streamrl.bus.embedded.cluster import start_cluster\n"
        "cluster = start_cluster(Path(sys.argv[1])); print(*cluster.pids, flush=True); sys.stdin.read()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    broker = ProcessId(pid, _started(pid) or "")
    assert broker.alive()
    starter.kill()
    starter.communicate()
    assert broker.wait_ended(5)
