"""One Kafka node: its configuration and folder, the wait until it serves, and the reason if it does not.

It uses no client library. It asks a node over Kafka's own protocol, so that the wait needs no event loop.
"""

import base64
import fcntl
import random
import re
import shutil
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamrl.bus.embedded.process import ProcessId
from streamrl.schemas.errors import BrokerError

HOST = "127.0.0.1"
LARGEST_MESSAGE = 64 * 1024 * 1024
REPLICATION_AT_MOST = 3
START_TIMEOUT_S = 90.0
CLAIM_TIMEOUT_S = 2.0
_POLL_S = 0.05
_ERROR_WORDS = re.compile(r"\b(FATAL|ERROR|Error|[A-Za-z.]*Exception)\b")
# Below the range from which systems take ports for outgoing connections. So no connection takes a node's port while the
# node is down, and the node can restart on it.
_PORTS = range(20_000, 32_000)
# A Metadata request, version 2, for no topic: API key, version, correlation id, client id, topics.
_METADATA = struct.pack(">hhih", 3, 2, 1, 5) + b"probe" + struct.pack(">i", 0)
_LARGEST_ANSWER = 1 << 20


@dataclass(frozen=True)
class NodeSpec:
    """One combined broker and controller: its id from 1, its ports, and its own folder.

    ``advertised_port``: the port that the node advertises to clients, if a proxy is in front of it. The brokers' own
    traffic then uses ``internal_port``, so that it does not pass the proxy. ``told_internal_port`` and
    ``told_controller_port``: the ports advertised to the other nodes, if proxies are in front of those too.
    """

    node_id: int
    port: int
    controller_port: int
    folder: Path
    advertised_port: int | None = None
    internal_port: int | None = None
    told_internal_port: int | None = None
    told_controller_port: int | None = None

    @property
    def data(self) -> Path:
        """Folder of Kafka's own files."""
        return self.folder / "data"

    @property
    def server_log(self) -> Path:
        """The node's log file."""
        return self.folder / "server.log"

    @property
    def output(self) -> Path:
        """File with the Java runtime's stdout and stderr."""
        return self.folder / "output.log"

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"


class PortTaken(BrokerError):
    """Another process took a port of the node before the node could listen on it."""


def new_uuid() -> str:
    """A Kafka uuid: 16 random bytes in unpadded URL-safe base64. It does not start like a command-line flag."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


@contextmanager
def claimed(spec: NodeSpec) -> Iterator[int]:
    """Claims the node's folder for one process; yields the file descriptor that passes the claim to that process.

    The claim lasts until every process that inherited the descriptor has ended, so two nodes never write one folder. It
    uses ``flock`` directly, because a ``FileLock`` unlocks at its end even if another process inherited the descriptor.
    Raises BrokerError if a node already runs there.
    """
    spec.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + CLAIM_TIMEOUT_S
    with (spec.folder / "lock").open("w") as claim:
        while True:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A process that was just killed releases its files a moment later.
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"a Kafka node already runs on the data in {spec.folder}: stop it (if `kafka up` started it: "
                        f"`streamrl kafka down --data-dir {spec.folder.parent}`), or name another folder"
                    ) from None
                time.sleep(_POLL_S)
        yield claim.fileno()


def cluster_id_of(spec: NodeSpec) -> str | None:
    """The id of the cluster that the node's folder was formatted for; None if it was not formatted."""
    meta = spec.data / "meta.properties"
    lines = meta.read_text().splitlines() if meta.exists() else []
    return next((line.partition("=")[2] for line in lines if line.startswith("cluster.id=")), None)


def write_configuration(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> None:
    """Writes the node's configuration files. Its ports may differ from those of an earlier start."""
    spec.data.mkdir(parents=True, exist_ok=True)
    # Compression codecs unpack native code into tmp, and a killed node leaves it behind.
    shutil.rmtree(spec.folder / "tmp", ignore_errors=True)
    spec.output.unlink(missing_ok=True)
    (spec.folder / "tmp").mkdir()
    (spec.folder / "server.properties").write_text(server_properties(spec, cluster))
    (spec.folder / "log4j2.properties").write_text(logging_properties(spec))


def format_storage(spec: NodeSpec, cluster_id: str, bootstrap_checkpoint: Path) -> None:
    """Formats the data folder for ``cluster_id``, as Kafka's storage tool does, without a second JVM start.

    ``bootstrap_checkpoint`` is that tool's own file of feature levels. It names neither node nor cluster.
    """
    shutil.copyfile(bootstrap_checkpoint, spec.data / "bootstrap.checkpoint")
    identity = {"version": 1, "cluster.id": cluster_id, "node.id": spec.node_id, "directory.id": new_uuid()}
    (spec.data / "meta.properties").write_text("".join(f"{key}={value}\n" for key, value in identity.items()))


def wait_ready(*starting: tuple[NodeSpec, ProcessId]) -> None:
    """Returns when each node serves clients and knows that all nodes are alive.

    The nodes are waited for together. If one ends, this raises at once, because the others cannot serve without it.
    Raises BrokerError with the error line in the log of a node that ended, or of one that does not serve after
    START_TIMEOUT_S seconds; PortTaken if a node ended because of a port.
    """
    wanted = {spec.node_id for spec, _ in starting}
    missing = list(starting)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        for spec, process in starting:
            if not process.alive():
                last_line = last_log_line(spec)
                kind = PortTaken if "Address already in use" in last_line else BrokerError
                raise kind(f"Kafka node {spec.node_id} ended while starting: {last_line}")
        missing = [node for node in missing if not _serves(node[0], wanted)]
        if not missing:
            return
        time.sleep(_POLL_S)
    raise BrokerError(
        f"Kafka did not serve within {START_TIMEOUT_S:.0f} s: "
        + "; ".join(f"node {spec.node_id} on {spec.address}: {last_log_line(spec)}" for spec, _ in missing)
    )


def _serves(spec: NodeSpec, wanted: set[int]) -> bool:
    try:
        # All brokers must be alive: topics made while some are missing get fewer replicas or are refused. The answer
        # must be from this cluster: if another cluster's node took the port, that node answers until this one exits.
        alive = live_brokers(spec.port)
    except OSError:
        return False  # not listening yet
    return alive.cluster_id == cluster_id_of(spec) and wanted <= alive.ids


def last_log_line(spec: NodeSpec) -> str:
    """The last line of the node's logs that reports an error, else the last line; and the log's path."""
    lines: list[str] = []
    for log in (spec.output, spec.server_log):
        if log.exists():
            lines += [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    errors = [line for line in lines if _ERROR_WORDS.search(line)]
    return f"{(errors or lines or ['it logged nothing'])[-1][:300]} (see {spec.server_log})"


# --- Configuration files: pure text from a cluster's plan ------------------------------------------------------------


def server_properties(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> str:
    """``server.properties`` of ``spec`` as a member of ``cluster``: loopback only, tuned for a small machine."""
    replicas = min(len(cluster), REPLICATION_AT_MOST)
    # With two replicas, requiring both in sync would stop all writing when either node is down.
    in_sync = 2 if replicas > 2 else 1
    settings: dict[str, str | int] = {
        **_identity(spec, cluster),
        **_durability(replicas, in_sync),
        **_limits(),
        **_footprint(),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _identity(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> dict[str, str | int]:
    listeners = [("PLAINTEXT", spec.port, spec.advertised_port or spec.port)]
    if spec.internal_port is not None:
        listeners.append(("INTERNAL", spec.internal_port, spec.told_internal_port or spec.internal_port))
    names = [name for name, *_ in listeners]
    advertised = [(name, port) for name, _, port in listeners]
    if spec.told_controller_port is not None:
        advertised.append(("CONTROLLER", spec.told_controller_port))
    voters = [(each.node_id, each.told_controller_port or each.controller_port) for each in cluster]
    return {
        "process.roles": "broker,controller",
        "node.id": spec.node_id,
        "controller.quorum.voters": ",".join(f"{node_id}@{HOST}:{port}" for node_id, port in voters),
        "listeners": ",".join(
            [*(f"{name}://{HOST}:{port}" for name, port, _ in listeners), f"CONTROLLER://{HOST}:{spec.controller_port}"]
        ),
        "advertised.listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in advertised),
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": names[-1],  # INTERNAL if there is one
        "listener.security.protocol.map": ",".join(
            ["CONTROLLER:PLAINTEXT", *(f"{name}:PLAINTEXT" for name, *_ in listeners)]
        ),
        "log.dirs": str(spec.data),
    }


def _durability(replicas: int, in_sync: int) -> dict[str, str | int]:
    return {
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        "unclean.leader.election.enable": "false",  # a lagging replica that leads would lose acknowledged records
        "auto.create.topics.enable": "false",  # otherwise a misspelt name becomes a topic
        "transaction.max.timeout.ms": 900_000,
        # A killed node can rejoin only after its old session has expired (default 9 s).
        "broker.session.timeout.ms": 4_000,
        "broker.heartbeat.interval.ms": 500,
    }


def _limits() -> dict[str, str | int]:
    return {
        "message.max.bytes": LARGEST_MESSAGE,
        "replica.fetch.max.bytes": LARGEST_MESSAGE,
        "fetch.max.bytes": LARGEST_MESSAGE,
        "socket.request.max.bytes": 2 * LARGEST_MESSAGE,  # a message and the request around it
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 500,
    }


def _footprint() -> dict[str, str | int]:
    return {
        "num.partitions": 1,
        "offsets.topic.num.partitions": 8,
        "transaction.state.log.num.partitions": 8,
        "share.coordinator.state.topic.num.partitions": 8,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "log.segment.bytes": 256 * 1024 * 1024,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
    }


def logging_properties(spec: NodeSpec) -> str:
    """Log4j's configuration: warnings and errors to the node's own log file, at most 2 x 8 MB, nothing to stdout."""
    return f"""status=error
appender.file.type=RollingFile
appender.file.name=File
appender.file.fileName={spec.server_log}
appender.file.filePattern={spec.server_log}.%i
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%d %p %m (%c)%n
appender.file.policies.type=SizeBasedTriggeringPolicy
appender.file.policies.size=8MB
appender.file.strategy.type=DefaultRolloverStrategy
appender.file.strategy.max=1
rootLogger.level=warn
rootLogger.appenderRef.file.ref=File
"""


# --- Ports, and the part of Kafka's protocol that shows which brokers serve ------------------------------------------


@dataclass(frozen=True)
class LiveBrokers:
    """A node's answer about its cluster: the cluster's id, and the ids of the brokers that it knows to be alive."""

    cluster_id: str | None
    ids: frozenset[int]


def live_brokers(port: int, timeout_s: float = 2.0) -> LiveBrokers:
    """The brokers that the node at ``port`` knows to be alive; none before the node can serve clients.

    Sends Metadata v2 with no topics. Raises OSError if nothing answers there.
    """
    with socket.create_connection((HOST, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(struct.pack(">i", len(_METADATA)) + _METADATA)
        (length,) = struct.unpack(">i", _receive(connection, 4))
        if not 0 <= length <= _LARGEST_ANSWER:
            raise OSError(f"{HOST}:{port} does not speak Kafka's protocol")
        return parse_brokers(_receive(connection, length))


def parse_brokers(answer: bytes) -> LiveBrokers:
    """The brokers in a Metadata v2 answer. Raises OSError if the bytes are no such answer."""
    try:
        _, count = struct.unpack_from(">ii", answer)
        position, ids = 8, set()
        for _ in range(count):
            node_id, host_length = struct.unpack_from(">ih", answer, position)
            position += 6 + host_length + 4  # node id and the host's length, the host, the port
            (rack_length,) = struct.unpack_from(">h", answer, position)
            position += 2 + max(0, rack_length)  # -1: no rack
            ids.add(node_id)
        (length,) = struct.unpack_from(">h", answer, position)
        (cluster_id,) = struct.unpack_from(f">{max(0, length)}s", answer, position + 2)
    except struct.error as error:
        raise OSError("the answer to a Kafka metadata request is cut short") from error
    return LiveBrokers(cluster_id.decode(errors="replace") if length >= 0 else None, frozenset(ids))


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionResetError("the broker closed the connection")
        received += chunk
    return bytes(received)


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    try:
        reserved(port).close()
    except (OSError, OverflowError):
        return False
    return True


def reserved(port: int) -> socket.socket:
    """A socket that keeps ``free_ports`` in any process from choosing a loopback port, until the socket is closed.

    It does not listen: clients are refused, and a server that sets SO_REUSEADDR, as Java's do, can listen there.
    Raises OSError if a server already listens there.
    """
    holder = socket.socket()
    try:
        # SO_REUSEADDR, so that lingering connections (TIME_WAIT) of an ended node do not block the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, port))
    except BaseException:
        holder.close()
        raise
    return holder


def _is_unused(port: int) -> bool:
    # Without SO_REUSEADDR, so that a ``reserved`` port is refused.
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_ports(count: int, but: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """``count`` different ports that were neither used nor reserved a moment ago, none of them in ``but``."""
    found: list[int] = []
    # Not from a seeded generator: processes that start together would all choose the same ports.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        if port not in but and _is_unused(port):
            found.append(port)
    return tuple(found)


def free_port(host: str) -> int:
    """A free port on one of this machine's addresses, chosen by the kernel."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
