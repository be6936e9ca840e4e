"""Where a run's records and settings come from, whether it still goes on, is over, or was exported.

A run's topics are at the broker that its settings name, at its own (running, or started again for this), or in exported
segments. Invariant the_run_is_left_as_it_is: a broker that is needed to read the run's own data is started on a copy.

What a run's folders alone tell is told without a heavy import: a command looks here before it lowers its priority.
"""

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import scope_of
from streamrl.settings.run_directory import RunDirectory

if TYPE_CHECKING:
    from streamrl.bus.history import History
    from streamrl.settings.tree import Settings

RUNS = Path("runs")
CHUNK = 1 << 20
_LISTENER = re.compile(r"^listeners=PLAINTEXT://([^,\s]+)", re.MULTILINE)


def directory_of(path: Path) -> RunDirectory | None:
    """A run's directory by its path, by its name under ``runs/``, or by its resolved configuration."""
    if path.is_file():
        path = path.parent
    return next((run for run in (RunDirectory(path), RunDirectory(RUNS / path)) if run.config.is_file()), None)


def nodes_of(run: RunDirectory) -> list[Path]:
    """Folders of the run's own broker, running or not; none if its topics are elsewhere."""
    return sorted(run.kafka.glob("node-*"))


def own_broker(run: RunDirectory) -> str | None:
    """Where the run's own broker listens, if it has one and it runs."""
    nodes = nodes_of(run)
    return running_brokers(nodes) if nodes else None


def running_brokers(nodes: list[Path]) -> str | None:
    """Addresses of the nodes, if a broker holds their folders."""
    addresses = []
    for node in nodes:
        properties, lock = node / "server.properties", node / "lock"
        if not properties.exists() or not lock.exists():
            return None
        with lock.open("rb") as claim:
            try:
                # Shared, so that two who look at the same time do not take each other for the broker.
                fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Whoever runs the node holds its lock: that it is held is the sign of life, which no crash can forge.
            except BlockingIOError:
                if (match := _LISTENER.search(properties.read_text())) is not None:
                    addresses.append(match[1])
    # A cluster with a node missing cannot be relied on to have every record.
    return ",".join(addresses) if len(addresses) == len(nodes) else None


@dataclass(frozen=True)
class PastRun:
    """A run's directory and the settings it was started with."""

    directory: RunDirectory
    settings: "Settings"

    @property
    def name(self) -> str:
        """Prefix of its topics; of an attached instance's directory, its scope."""
        return scope_of(self.settings.run.name, self.settings.run.instance)

    @property
    def weights(self) -> Path:
        """Its weights store, also if the directory was moved."""
        return self.directory.path / self.settings.run.weights_store.name

    @property
    def checkpoints(self) -> str | Path:
        """Where its checkpoints are, also if the directory was moved."""
        return self.settings.training.checkpoint_location or self.directory.checkpoints


def open_run(path: Path) -> PastRun:
    """A run by its directory, by its name under ``runs/``, or by the configuration file it was started with.

    Raises:
        UserError: it has no resolved configuration.
    """
    from streamrl.settings.loading import load_settings

    # A configuration that a person wrote, rather than the resolved one in the run's directory.
    if path.is_file() and path.name != RunDirectory(path).config.name:
        settings = load_settings(path, [], to_look=True)
        return PastRun(RunDirectory(settings.run.path), settings)
    if (directory := directory_of(path)) is not None:
        return PastRun(directory, load_settings(directory.config, [], to_look=True))
    config = RunDirectory(path).config.name
    raise UserError(f"expected a run's directory with {config}, or its name under {RUNS}/, got {no_run(path)}")


def no_run(path: Path) -> str:
    """What is wrong with a path that is no run's: not there, or a directory without a run; those in its ``runs/``."""
    if not path.is_dir():
        return f"{path}, which does not exist"
    there = path / RUNS
    runs = sorted(config.parent.name for config in there.glob(f"*/{RunDirectory(path).config.name}"))
    inside = f"; runs are in {there}: {', '.join(runs)}" if runs else ""
    return f"{path}, which has none{inside}"


@contextmanager
def history_of(
    run: PastRun, export: Path | None, scratch: Path, progress: Callable[[str], None]
) -> "Iterator[History]":
    """The run's history: exported segments if named, else from a broker.

    Raises:
        UserError: there are no such segments, or no broker has the run's topics.
    """
    if export is not None:
        from streamrl.inspection.export import SegmentHistory

        yield SegmentHistory(export)
        return
    from streamrl.bus.history import BusHistory
    from streamrl.bus.kafka.bus import KafkaBus

    with broker_of(run, scratch, progress) as address:
        kafka = run.settings.kafka.model_copy(update={"bootstrap_servers": address})
        yield BusHistory(KafkaBus(kafka), client_id="replay")


@contextmanager
def broker_of(run: PastRun, scratch: Path | None, progress: Callable[[str], None]) -> Iterator[str]:
    """The address of a broker with the run's topics: the named one, its own that still runs, else one started on a copy
    of its data in ``scratch`` (None: on the data itself, so that what is written stays).

    Raises:
        UserError: there is none.
    """
    from streamrl.bus.embedded import detached

    if (named := run.settings.kafka.bootstrap_servers) is not None:
        yield named
        return
    if (address := own_broker(run.directory)) is not None:
        yield address
        return
    if nodes := nodes_of(run.directory):
        from streamrl.bus.embedded.cluster import start_cluster

        data = run.directory.kafka if scratch is None else scratch / "kafka"
        if scratch is not None:
            for node in nodes:
                _copy_node(node, data / node.name)
        with start_cluster(data, nodes=len(nodes), progress=progress) as cluster:
            yield cluster.bootstrap_servers
        return
    # Last of all the broker of `streamrl kafka up`, which may serve many runs.
    if (address := detached.left_running()) is None:
        raise UserError(
            f"expected a broker with the topics of run {run.name}, got none: name it with "
            "STREAMRL_KAFKA__BOOTSTRAP_SERVERS, or read an export with --export DIR"
        )
    yield address


def _copy_node(source: Path, target: Path) -> None:
    """Copy a broker node's folder without what belongs to its process."""
    # Locks and logs belong to the process that wrote them; a copy gets its own.
    ignored = shutil.ignore_patterns("tmp", "lock", ".lock", "*.log.*", "output.log", "server.log")
    shutil.copytree(source, target, ignore=ignored, copy_function=copy_sparse)


def copy_sparse(source: str, target: str) -> str:
    """Copy a file; runs of zeros stay holes, for Kafka allocates its indexes in advance."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(CHUNK):
            # Kafka allocates 10 MB of index for each partition in advance, nearly all of it zeros.
            if chunk.count(0) == len(chunk):
                writer.seek(len(chunk), 1)
            else:
                writer.write(chunk)
        # Seeking alone writes nothing: a file that ends in a hole gets its length here.
        writer.truncate()
    return target
