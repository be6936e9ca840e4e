"""A running cluster of one or more nodes: start, stop, kill and restart. Knows nothing of who uses it or of topics.

``kill_node``, ``restart_node`` and ``pids`` have no user in the product: chaos tests break brokers with them, and they
stand here because they are the inverse of ``start``.
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
PORT_ATTEMPTS = 3  # free ports are chosen, then taken: another process may be quicker, hardly three times in a row


class Cluster:
    """Nodes that were started together. Use as a context manager, or call ``stop``; nodes are counted from 0."""

    def __init__(self, specs: tuple[NodeSpec, ...], runtime: Runtime, heap_mb: int, detached: bool) -> None:
        self.specs = specs
        # Data that is there decides: a node whose folder is of another cluster does not start.
        self._cluster_id = next(filter(None, map(cluster_id_of, specs)), None) or new_uuid()
        self._runtime = runtime
        self._heap_mb = heap_mb
        self._detached = detached
        self._ties: dict[int, TiedProcess] = {}
        self._processes: dict[int, ProcessId] = {}
        # One for each port of the nodes, so that no other process chooses it while a node is down.
        self._reserved: list[socket.socket] = []

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every node, separated by commas."""
        return ",".join(spec.address for spec in self.specs)

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The process of each node, also of a killed one."""
        return tuple(self._processes[index] for index in range(len(self.specs)))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of ``processes``."""
        return tuple(process.pid for process in self.processes)

    def start(self) -> None:
        """Starts all nodes; returns when each serves and knows all. Raises BrokerError, leaving none behind."""
        try:
            if not self._detached:  # then nobody restarts a single node
                self._reserve_ports()
            for index in range(len(self.specs)):
                self._launch(index)
            # Waiting only when all are launched: no node serves before a quorum of them is up.
            wait_ready(*zip(self.specs, self.processes, strict=True))
        except BaseException:
            self.stop(timeout_s=0.0)  # SIGKILL at once: it serves nobody yet
            raise

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops all nodes, gracefully within ``timeout_s``; keeps their data. May be called again."""
        with held():
            # Before the ties are closed, which kills without a warning.
            stop_all(list(self._processes.values()), timeout_s)
            while self._ties:
                self._ties.popitem()[1].close()
            while self._reserved:
                self._reserved.pop().close()

    def _reserve_ports(self) -> None:
        for spec in self.specs:
            for port in (spec.port, spec.controller_port, spec.internal_port):
                # A port that another process has just taken: the node ends, and ``wait_ready`` says so.
                with suppress(OSError):
                    self._reserved += [] if port is None else [reserved(port)]

    def kill_node(self, index: int) -> None:
        """SIGKILLs a node; returns when its process is gone."""
        process = self._processes[index]
        process.send(signal.SIGKILL)
        process.wait_gone(STOP_TIMEOUT_S)
        if tie := self._ties.pop(index, None):
            tie.close()

    def restart_node(self, index: int) -> None:
        """Starts an ended node again on its ports and data; returns when it serves. Raises BrokerError."""
        if self._processes[index].alive():
            raise BrokerError(f"Kafka node {self.specs[index].node_id} still runs: kill it before restarting it")
        if tie := self._ties.pop(index, None):
            tie.close()
        self._launch(index)
        # Only itself: others may be down on purpose.
        wait_ready((self.specs[index], self._processes[index]))

    def _launch(self, index: int) -> None:
        spec = self.specs[index]
        command = self._runtime.broker_command(spec, self._heap_mb)
        # The claim spans formatting and start: two starters could otherwise format one folder with two ids.
        with claimed(spec) as claim:
            write_configuration(spec, self.specs)
            # Data of an earlier start is never formatted again.
            if cluster_id_of(spec) is None:
                format_storage(spec, self._cluster_id, self._runtime.bootstrap_checkpoint)
            with held():  # what is started is also noted, and so ended
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
    """A serving cluster on loopback, with its data in ``data_dir`` (made, or taken up where an earlier one left it).

    Node i listens on ``port + i``, or on free ports when ``port`` is None. The nodes end with this process unless
    ``detached``. ``advertised_ports``: where clients are told to come instead, to a proxy before each node.
    Raises BrokerError: no Java, no jars, a port in use, another number of nodes in ``data_dir``,
    or a node that does not start.
    """
    tell = progress or (lambda line: None)
    if nodes < 1:
        raise BrokerError(f"a Kafka cluster needs at least one node, got nodes = {nodes}")
    runtime = prepare(tell)
    for attempts_left in reversed(range(PORT_ATTEMPTS)):
        specs = plan(data_dir.absolute(), nodes, port, advertised_ports)
        tell(f"starting Kafka {KAFKA_VERSION} on {', '.join(spec.address for spec in specs)}")
        try:
            with _explained(data_dir):
                cluster = Cluster(specs, runtime, heap_mb, detached)
                cluster.start()
            return cluster
        except PortTaken:
            # Between the choice and the start another process took one of the free ports: choose anew.
            if not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def plan(
    data_dir: Path, nodes: int, port: int | None, advertised_ports: Sequence[int] | None = None
) -> tuple[NodeSpec, ...]:
    """Folders and ports of the nodes.

    Raises BrokerError for a port in use, data of another number of nodes, or a folder that Kafka cannot be told of.
    """
    if "," in str(data_dir):  # ``log.dirs`` is a list, and knows no way to write a comma
        raise BrokerError(f"expected a folder without a comma in its path for Kafka's data, got {data_dir}: rename it")
    # With more or fewer nodes there are other voters than those that the folders' metadata logs come from.
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
                f"Kafka cannot listen on {HOST}:{each}, the port is in use or none: stop what uses it, or name another"
            )
    # Controller ports, then internal ones; always chosen anew, as no client knows them.
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
