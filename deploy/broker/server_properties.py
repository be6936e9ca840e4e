"""The text of Kafka's configuration files, from a cluster's plan. Pure: opens no file and no socket."""

from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
LARGEST_MESSAGE = 64 * 1024 * 1024
REPLICATION_AT_MOST = 3


@dataclass(frozen=True)
class NodeSpec:
    """One combined broker and controller: its id from 1, its ports, and the folder that is all its own.

    ``advertised_port``: where clients are told to come, if a proxy stands before the node; the brokers' own traffic
    then goes over ``internal_port``, so that it does not pass the proxy.
    """

    node_id: int
    port: int
    controller_port: int
    folder: Path
    advertised_port: int | None = None
    internal_port: int | None = None

    @property
    def data(self) -> Path:
        """Kafka's own files."""
        return self.folder / "data"

    @property
    def server_log(self) -> Path:
        """What the node logs."""
        return self.folder / "server.log"

    @property
    def output(self) -> Path:
        """What the Java runtime writes to stdout and stderr."""
        return self.folder / "output.log"

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"


def server_properties(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> str:
    """``server.properties`` of ``spec`` as a member of ``cluster``: loopback only, tuned for a small machine."""
    replicas = min(len(cluster), REPLICATION_AT_MOST)
    in_sync = 2 if replicas > 2 else 1
    settings: dict[str, str | int] = {
        **_identity(spec, cluster),
        **_durability(replicas, in_sync),
        **_limits(),
        **_footprint(),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _identity(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> dict[str, str | int]:
    ours = [("PLAINTEXT", spec.port, spec.advertised_port or spec.port)]
    if spec.internal_port is not None:
        ours.append(("INTERNAL", spec.internal_port, spec.internal_port))
    names = [name for name, *_ in ours]
    return {
        "process.roles": "broker,controller",
        "node.id": spec.node_id,
        "controller.quorum.voters": ",".join(f"{each.node_id}@{HOST}:{each.controller_port}" for each in cluster),
        "listeners": ",".join(
            [*(f"{name}://{HOST}:{port}" for name, port, _ in ours), f"CONTROLLER://{HOST}:{spec.controller_port}"]
        ),
        "advertised.listeners": ",".join(f"{name}://{HOST}:{told}" for name, _, told in ours),
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": names[-1],
        "listener.security.protocol.map": ",".join(
            ["CONTROLLER:PLAINTEXT", *(f"{name}:PLAINTEXT" for name, *_ in ours)]
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
        "unclean.leader.election.enable": "false",
        "auto.create.topics.enable": "false",
        "transaction.max.timeout.ms": 900_000,
        # A killed node is let back in only when its old session has run out (default 9 s).
        "broker.session.timeout.ms": 4_000,
        "broker.heartbeat.interval.ms": 500,
    }


def _limits() -> dict[str, str | int]:
    return {
        "message.max.bytes": LARGEST_MESSAGE,
        "replica.fetch.max.bytes": LARGEST_MESSAGE,
        "fetch.max.bytes": LARGEST_MESSAGE,
        "socket.request.max.bytes": 2 * LARGEST_MESSAGE,
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
