"""A pytest plugin: ``bootstrap_servers`` is a real broker for the whole session (one per xdist worker).

The named one, else Apache Kafka's container image where a Docker engine answers, else an embedded node.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.embedded.cluster import start_cluster
from bus.embedded.jars import KAFKA_VERSION
from bus.embedded.node import HOST, free_ports, live_brokers

NAMED_BY = "STREAMRL_KAFKA__BOOTSTRAP_SERVERS"
HEAP_MB = 256
CONTAINER_START_S = 120


@pytest.fixture(scope="session")
def bootstrap_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of the session's broker."""
    if named := os.environ.get(NAMED_BY):
        yield named
    elif docker_answers():
        yield from _container()
    else:
        yield from _embedded(tmp_path_factory.mktemp("kafka"))


def docker_answers() -> bool:
    """Whether testcontainers is installed and a Docker engine replies."""
    if not (importlib.util.find_spec("testcontainers") and importlib.util.find_spec("docker")):
        return False
    docker = importlib.import_module("docker")
    try:
        client = docker.from_env(timeout=5)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except (docker.errors.DockerException, OSError):
        return False


def _embedded(folder: Path) -> Iterator[str]:
    with start_cluster(folder, heap_mb=HEAP_MB) as cluster:
        yield cluster.bootstrap_servers


def _container() -> Iterator[str]:
    (port,) = free_ports(1)
    container = importlib.import_module("testcontainers.core.container").DockerContainer(
        f"apache/kafka:{KAFKA_VERSION}"
    )
    container.with_envs(**_container_settings(port)).with_bind_ports(9092, port)
    with container:
        deadline = time.monotonic() + CONTAINER_START_S
        while not _serves(port):
            if time.monotonic() > deadline:
                pytest.fail(f"the Kafka container did not serve within {CONTAINER_START_S} s")
            time.sleep(0.2)
        yield f"{HOST}:{port}"


def _container_settings(port: int) -> dict[str, str]:
    settings = {
        "node.id": "1",
        "process.roles": "broker,controller",
        "controller.quorum.voters": "1@localhost:29093",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "listeners": "CONTROLLER://:29093,PLAINTEXT://:9092",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "500",
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(64 * 1024 * 1024),
    }
    return {"KAFKA_" + key.replace(".", "_").upper(): value for key, value in settings.items()}


def _serves(port: int) -> bool:
    try:
        return bool(live_brokers(port))
    except OSError:
        return False
