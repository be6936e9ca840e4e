"""A cluster that outlives the command that started it: up, down and status, by a state file in its data folder."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from streamrl.bus.embedded.cluster import STOP_TIMEOUT_S, Cluster, start_cluster
from streamrl.bus.embedded.jars import KAFKA_VERSION, Progress
from streamrl.bus.embedded.node import HOST
from streamrl.bus.embedded.process import ProcessId, stop_all
from streamrl.bus.embedded.runtime import cache_root
from streamrl.schemas.errors import BrokerError
from streamrl.schemas.files import write_atomically


class NodeStatus(BaseModel):
    """One node: its process by pid and start time, its port, and whether it runs."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: str
    port: int
    alive: bool = True


class ClusterStatus(BaseModel):
    """The state of the cluster in ``data_dir``; no nodes if none was started. ``since``: seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    data_dir: Path
    version: str = KAFKA_VERSION
    since: float | None = None
    nodes: tuple[NodeStatus, ...] = ()

    @property
    def running(self) -> bool:
        """Whether all nodes run."""
        return bool(self.nodes) and all(node.alive for node in self.nodes)

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every node, separated by commas; empty if there are no nodes."""
        return ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the nodes that run."""
        return tuple(node.pid for node in self.nodes if node.alive)


def default_data_dir() -> Path:
    """The folder ``kafka`` in the cache."""
    return cache_root() / "kafka"


def up(
    nodes: int = 1, data_dir: Path | None = None, port: int | None = None, progress: Progress | None = None
) -> ClusterStatus:
    """Starts a cluster that outlives this process, or finds it running. If a node has died, all are restarted.

    Raises BrokerError, also if a cluster with other ``nodes`` or another ``port`` runs in ``data_dir``.
    """
    folder = (data_dir or default_data_dir()).absolute()
    with _one_at_a_time(folder):
        before = status(folder)
        if before.running:
            _refuse_another(before, nodes, port)
            return before
        _stop(before)
        cluster = start_cluster(folder, nodes=nodes, port=port, progress=progress, detached=True)
        try:
            return _record(folder, cluster)
        except BaseException:
            cluster.stop(timeout_s=0.0)
            raise


def down(data_dir: Path | None = None) -> bool:
    """Stops the cluster and removes its state file; its topics' data stays. Returns whether any node was running."""
    folder = (data_dir or default_data_dir()).absolute()
    if not _state_file(folder).exists():
        return False
    with _one_at_a_time(folder):
        before = status(folder)
        _stop(before)
        return any(node.alive for node in before.nodes)


def status(data_dir: Path | None = None) -> ClusterStatus:
    """The cluster's present state, checked by its processes. Raises BrokerError if the state file cannot be read."""
    folder = (data_dir or default_data_dir()).absolute()
    state = _state_file(folder)
    try:
        recorded = ClusterStatus.model_validate_json(state.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ClusterStatus(data_dir=folder)
    except (OSError, ValidationError) as error:
        raise BrokerError(f"{state} is no valid record of a running Kafka cluster: remove the file") from error
    nodes = tuple(node.model_copy(update={"alive": _process(node).alive()}) for node in recorded.nodes)
    return recorded.model_copy(update={"nodes": nodes, "data_dir": folder})


def running_bootstrap_servers() -> str | None:
    """Addresses of the cluster that `streamrl kafka up` started on this machine; None if none runs.

    Raises:
        BrokerError: the state file cannot be read.
    """
    found = status(default_data_dir())
    return found.bootstrap_servers if found.running else None


def _refuse_another(running: ClusterStatus, nodes: int, port: int | None) -> None:
    if nodes != len(running.nodes) or port not in (None, running.nodes[0].port):
        raise BrokerError(
            f"a Kafka cluster of {len(running.nodes)} node(s) already runs at {running.bootstrap_servers}, "
            f"with its data in {running.data_dir}: stop it first (`streamrl kafka down --data-dir "
            f"{running.data_dir}`), or name another folder"
        )


def _record(folder: Path, cluster: Cluster) -> ClusterStatus:
    nodes = tuple(
        NodeStatus(pid=process.pid, started=process.started, port=spec.port)
        for process, spec in zip(cluster.processes, cluster.specs, strict=True)
    )
    made = ClusterStatus(data_dir=folder, since=time.time(), nodes=nodes)
    write_atomically(_state_file(folder), made.model_dump_json(indent=2))
    return made


def _stop(recorded: ClusterStatus) -> None:
    stop_all([_process(node) for node in recorded.nodes], STOP_TIMEOUT_S)
    _state_file(recorded.data_dir).unlink(missing_ok=True)


def _process(node: NodeStatus) -> ProcessId:
    return ProcessId(node.pid, node.started)


def _state_file(folder: Path) -> Path:
    return folder / "state.json"


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise BrokerError(
            f"expected a writable folder for Kafka's data, got {folder}: {error.strerror}; name another "
            "with --data-dir, or set STREAMRL_CACHE"
        ) from error
    try:
        yield
    finally:
        lock.release()
