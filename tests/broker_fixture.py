"""A pytest plugin: ``bootstrap_servers`` is a real broker for the whole session, shared by the processes of xdist.

The named one, else Apache Kafka's container image where a Docker engine answers, else an embedded node. It is started
when the first test asks for it. Names on it are to be unique in the session: see ``unique_numbers``.
"""

import gc
import itertools
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.bus.embedded.node import HOST, free_ports, live_brokers
from streamrl.schemas.errors import BrokerError
from tests.tiers import starts

NAMED_BY = "STREAMRL_KAFKA__BOOTSTRAP_SERVERS"
HEAP_MB = 256
SHARED_HEAP_MB = 512
CONTAINER_START_S = 120
"""Pulling the image included."""
POLL_S = 0.1
REFUSAL = "no broker: "


def unique_numbers() -> Iterator[int]:
    """For names on the broker: other processes of the session count elsewhere."""
    return itertools.count(os.getpid() * 1000)


@pytest.fixture(scope="session")
def bootstrap_servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of the session's broker."""
    starts.expect_allowed("a broker")
    if named := os.environ.get(NAMED_BY):
        yield named
    elif hasattr(request.config, "workerinput"):
        yield SharedBroker(tmp_path_factory.getbasetemp().parent).wanted()
    else:
        with ExitStack() as stack:
            yield _started(stack, tmp_path_factory.mktemp("kafka"), HEAP_MB)


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that only distributes tests holds the broker, since it outlives the others."""
    config = session.config
    distributes = not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no"
    if distributes and NAMED_BY not in os.environ:
        config.stash[SHARED] = SharedBroker(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        config.stash[SHARED].start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The broker ends with the session."""
    if (shared := session.config.stash.get(SHARED, None)) is not None:
        shared.stop()


class SharedBroker(threading.Thread):
    """A broker for all processes that know ``folder``: who wants it writes a file, and finds the address in another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="shared broker")
        self._folder, self._over = folder / "broker", threading.Event()
        self._wish, self._answer = self._folder / "wanted", self._folder / "address"

    def run(self) -> None:
        """Start it when somebody asks, and hold it until ``stop``."""
        self._folder.mkdir()
        while not self._wish.exists():
            if self._over.wait(POLL_S):
                return
        with ExitStack() as stack:
            draft = self._folder / "draft"
            try:
                draft.write_text(_started(stack, self._folder / "kafka", SHARED_HEAP_MB))
            except (BrokerError, OSError) as error:
                draft.write_text(f"{REFUSAL}{error}")
            draft.rename(self._answer)
            self._over.wait()

    def stop(self) -> None:
        """End the broker, if there is one."""
        self._over.set()
        self.join()

    def wanted(self) -> str:
        """Ask for it; its address."""
        self._wish.touch()
        deadline = time.monotonic() + CONTAINER_START_S
        while not self._answer.exists():
            if time.monotonic() > deadline:
                pytest.fail(f"no broker of the session within {CONTAINER_START_S} s")
            time.sleep(POLL_S)
        if (answer := self._answer.read_text()).startswith(REFUSAL):
            pytest.fail(answer)
        return answer


SHARED = pytest.StashKey[SharedBroker]()


def _started(stack: ExitStack, folder: Path, heap_mb: int) -> str:
    """The address of a broker that ends with the stack."""
    address = in_a_container(stack) if docker_answers() else None
    if address is None:
        address = stack.enter_context(start_cluster(folder, heap_mb=heap_mb)).bootstrap_servers
    return address


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
    container.ports["9092/tcp"] = (HOST, port)  # type: ignore[assignment]  # as docker takes it
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
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,INTERNAL:PLAINTEXT",
        "listeners": "CONTROLLER://:29093,PLAINTEXT://:9092,INTERNAL://localhost:29092",
        # The broker asks itself about transactions, and inside the container nobody serves the host's port.
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port},INTERNAL://localhost:29092",
        "inter.broker.listener.name": "INTERNAL",
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
        return bool(live_brokers(port).ids)
    except OSError:
        return False
