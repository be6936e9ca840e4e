"""A pytest plugin: ``bootstrap_servers`` is a real broker for the whole session (one per xdist worker).

The named one, else Apache Kafka's container image where a Docker engine answers, else an embedded node.
"""

import gc
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bus.embedded.cluster import start_cluster
from bus.embedded.jars import KAFKA_VERSION
from bus.embedded.node import HOST, free_ports, live_brokers

NAMED_BY = "STREAMRL_KAFKA__BOOTSTRAP_SERVERS"
HEAP_MB = 256
CONTAINER_START_S = 120
"""Pulling the image included."""


@pytest.fixture(scope="session")
def bootstrap_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of the session's broker."""
    if named := os.environ.get(NAMED_BY):
        yield named
        return
    with ExitStack() as stack:
        address = in_a_container(stack) if docker_answers() else None
        if address is None:
            cluster = stack.enter_context(start_cluster(tmp_path_factory.mktemp("kafka"), heap_mb=HEAP_MB))
            address = cluster.bootstrap_servers
        yield address


def docker_answers() -> bool:
    """Whether a Docker engine replies; vLLM's environment has no client to ask it with."""
    try:
        import docker
    except ImportError:
        return False
    if "DOCKER_HOST" not in os.environ and not Path("/var/run/docker.sock").exists():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client leaves a socket open that nobody answered
        try:
            client = docker.from_env(timeout=5)
            try:
                return bool(client.ping())
            finally:
                client.close()
        except (docker.errors.DockerException, OSError):
            return False
        finally:
            gc.collect()


def in_a_container(stack: ExitStack) -> str | None:
    """The address of a broker in a container, on loopback only; None where the image cannot be had."""
    import docker
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    # Its reaper would be one more image to pull, with a port that is open to the network; the stack removes the broker.
    testcontainers_config.ryuk_disabled = True
    (port,) = free_ports(1)
    container = DockerContainer(f"apache/kafka:{KAFKA_VERSION}")
    container.with_envs(**_container_settings(port))
    # `with_bind_ports` knows no address, and would open the port to the network.
    container.ports["9092/tcp"] = (HOST, port)
    try:
        stack.enter_context(container)
    except (docker.errors.DockerException, OSError) as error:
        print(f"no broker in a container, an embedded one instead: {error}")
        return None
    deadline = time.monotonic() + CONTAINER_START_S
    while not _serves(port):
        if time.monotonic() > deadline:
            pytest.fail(f"the Kafka container did not serve within {CONTAINER_START_S} s")
        time.sleep(0.2)
    return f"{HOST}:{port}"


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
