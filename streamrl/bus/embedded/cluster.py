"""A running cluster of one or more nodes: start, stop, kill and restart. Knows neither its users nor topics.

The product does not use ``kill_node``, ``restart_node`` and ``pids``. Chaos tests break brokers with them. They are
here because they undo what ``start`` does.
"""

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from streamrl.bus.embedded.jars import KAFKA_VERSION, Progress
from streamrl.bus.embedded.node import (
    HOST,
    NodeSpec,
    PortTaken,
    claimed,
    cluster_id_of,
    format_storage,
    free_ports,
    is_free,
    new_uuid,
    reserved,
    wait_ready,
    write_configuration,
)
from streamrl.bus.embedded.process import ProcessId, TiedProcess, start_detached, stop_all
from streamrl.bus.embedded.runtime import Runtime, prepare
from streamrl.schemas.errors import BrokerError
from streamrl.schemas.stopping import held

STOP_TIMEOUT_S = 10.0
PORT_ATTEMPTS = 3  # another process may take a chosen port before the node does, but hardly three times in a row


class Cluster:
    """Nodes that are started together. Use it as a context manager or call ``stop``. Nodes are numbered from 0."""

    def __init__(self, specs: tuple[NodeSpec, ...], runtime: Runtime, heap_mb: int, detached: bool) -> None:
        self.specs = specs
        # Existing data decides: a node does not start if its folder belongs to another cluster.
        self._cluster_id = next(filter(None, map(cluster_id_of, specs)), None) or new_uuid()
        self._runtime = runtime
        self._heap_mb = heap_mb
        self._detached = detached
        self._ties: dict[int, TiedProcess] = {}
        self._processes: dict[int, ProcessId] = {}
        # A socket for each port of the nodes, so that no other process chooses the port while its node is down.
        self._reserved: list[socket.socket] = []

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every node, separated by commas."""
        return ",".join(spec.address for spec in self.specs)

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The process of each node, including killed ones."""
        return tuple(self._processes[index] for index in range(len(self.specs)))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of ``processes``."""
        return tuple(process.pid for process in self.processes)

    def start(self) -> None:
        """Starts all nodes; returns when each serves and knows all others.

        Raises BrokerError; then no node is left running.
        """
        try:
            if not self._detached:  # single nodes of a detached cluster are never restarted
                self._reserve_ports()
            for index in range(len(self.specs)):
                self._launch(index)
            # The wait comes after all launches: no node serves before a quorum is up.
            wait_ready(*zip(self.specs, self.processes, strict=True))
        except BaseException:
            self.stop(timeout_s=0.0)  # SIGKILL at once: no client uses the nodes yet
            raise

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops all nodes, gracefully within ``timeout_s`` seconds, and keeps their data; idempotent."""
        with held():
            # Before the ties are closed, because closing a tie kills at once.
            stop_all(list(self._processes.values()), timeout_s)
            while self._ties:
                self._ties.popitem()[1].close()
            while self._reserved:
                self._reserved.pop().close()

    def _reserve_ports(self) -> None:
        for spec in self.specs:
            for port in (spec.port, spec.controller_port, spec.internal_port):
                # If another process has just taken the port, the node exits, and ``wait_ready`` reports that.
                with suppress(OSError):
                    self._reserved += [] if port is None else [reserved(port)]

    def kill_node(self, index: int) -> None:
        """Sends SIGKILL to a node; returns when its process is gone."""
        process = self._processes[index]
        process.send(signal.SIGKILL)
        process.wait_ended(STOP_TIMEOUT_S)
        if tie := self._ties.pop(index, None):
            tie.close()

    def restart_node(self, index: int) -> None:
        """Restarts a node that has ended, on its ports and data; returns when it serves. Raises BrokerError."""
        if self._processes[index].alive():
            raise BrokerError(f"Kafka node {self.specs[index].node_id} still runs: kill it before a restart")
        if tie := self._ties.pop(index, None):
            tie.close()
        self._launch(index)
        # Wait only for this node: others may be down on purpose.
        wait_ready((self.specs[index], self._processes[index]))

    def _launch(self, index: int) -> None:
        spec = self.specs[index]
        command = self._runtime.broker_command(spec, self._heap_mb)
        # One claim covers formatting and start. Otherwise two processes could format one folder with two ids.
        with claimed(spec) as claim:
            write_configuration(spec, self.specs)
            # Data of an earlier start is never formatted again.
            if cluster_id_of(spec) is None:
                format_storage(spec, self._cluster_id, self._runtime.bootstrap_checkpoint)
            with held():  # so that a started process is always recorded, and later stopped
                if self._detached:
                    self._processes[index] = start_detached(command, spec.folder, spec.output, [claim])
                else:
                    self._ties[index] = TiedProcess(command, spec.folder, spec.output, [claim])
                    self._processes[index] = self._ties[index].id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def start_cluster(
    data_dir: Path,
    *,
    nodes: int = 1,
    port: int | None = None,
    heap_mb: int = 384,
    progress: Progress | None = None,
    detached: bool = False,
    advertised_ports: Sequence[int] | None = None,
) -> Cluster:
    """A serving cluster on loopback, with its data in ``data_dir``: new, or continued from an earlier cluster.

    Node i listens on ``port + i``, or on free ports when ``port`` is None. The nodes end with this process unless
    ``detached``. ``advertised_ports``: ports that the nodes advertise to clients instead, those of a proxy before each
    node. Raises BrokerError: no Java, no jars, a port in use, another number of nodes in ``data_dir``, or a node that
    does not start.
    """
    report = progress or (lambda line: None)
    if nodes < 1:
        raise BrokerError(f"a Kafka cluster needs at least one node, got nodes = {nodes}")
    runtime = prepare(report)
    for attempts_left in reversed(range(PORT_ATTEMPTS)):
        specs = plan(data_dir.absolute(), nodes, port, advertised_ports)
        report(f"starting Kafka {KAFKA_VERSION} on {', '.join(spec.address for spec in specs)}")
        try:
            with _explained(data_dir):
                cluster = Cluster(specs, runtime, heap_mb, detached)
                cluster.start()
            return cluster
        except PortTaken:
            # Another process took a port between the choice and the start: choose again.
            if not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def plan(
    data_dir: Path, nodes: int, port: int | None, advertised_ports: Sequence[int] | None = None
) -> tuple[NodeSpec, ...]:
    """Folders and ports of the nodes.

    Raises BrokerError for a port in use, data of another number of nodes, or a folder name that Kafka cannot express.
    """
    if "," in str(data_dir):  # ``log.dirs`` is a list of folders separated by commas, and a comma cannot be escaped
        raise BrokerError(f"expected a folder without a comma in its path for Kafka's data, got {data_dir}: rename it")
    # With another number of nodes, the voters would differ from those in the folders' metadata logs.
    found = len(list(data_dir.glob("node-*")))
    if found not in (0, nodes):
        raise BrokerError(
            f"{data_dir} holds the data of a Kafka cluster of {found} node(s), not {nodes}: "
            f"start {found} node(s), or name another folder"
        )
    ports = tuple(range(port, port + nodes)) if port is not None else free_ports(nodes)
    for each in ports:
        if not is_free(each):
            raise BrokerError(
                f"Kafka cannot listen on {HOST}:{each}, the port is in use or invalid: stop the process that uses it, "
                "or choose another port"
            )
    # Controller ports, then internal ports. They are chosen at every start, as no client knows them.
    others = free_ports(2 * nodes, but=frozenset((*ports, *(advertised_ports or ()))))
    return tuple(
        NodeSpec(
            index + 1,
            ports[index],
            others[index],
            data_dir / f"node-{index + 1}",
            advertised_port=advertised_ports[index] if advertised_ports else None,
            internal_port=others[nodes + index] if advertised_ports else None,
        )
        for index in range(nodes)
    )


@contextmanager
def _explained(data_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BrokerError(f"Kafka's data folder {data_dir} cannot be used ({error}): name another folder") from error
