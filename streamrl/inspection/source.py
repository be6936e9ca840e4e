"""Opens the records and settings of a run that is running, has ended, or was exported.

A run's topics are at the broker that its settings name, at the run's own broker (running, or restarted to read them),
or in exported segments. Invariant reading_does_not_change_a_run: a broker that is started to read the run's own data
gets a copy of them.

Functions that only look at a run's folders import no heavy module: a command calls them before it lowers its priority.
"""

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import scope_of
from streamrl.settings.run_directory import CONFIG, RunDirectory

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
    """Folders of the run's own broker, running or not; empty if its topics are on another broker."""
    return sorted(run.kafka.glob("node-*"))


def own_broker(run: RunDirectory) -> str | None:
    """The address of the run's own broker; None if it has none or it is not running."""
    nodes = nodes_of(run)
    return running_brokers(nodes) if nodes else None


def running_brokers(nodes: list[Path]) -> str | None:
    """Addresses of the nodes; None if any of them is not running."""
    addresses = []
    for node in nodes:
        properties, lock = node / "server.properties", node / "lock"
        if not properties.exists() or not lock.exists():
            return None
        with lock.open("rb") as claim:
            try:
                # Shared, so that two commands that look at the same time do not take each other for the broker.
                fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # A running node holds its lock exclusively. A crash releases it, so a held lock proves that the node runs.
            except BlockingIOError:
                if (match := _LISTENER.search(properties.read_text())) is not None:
                    addresses.append(match[1])
    # A cluster that lacks a node may not have every record.
    return ",".join(addresses) if len(addresses) == len(nodes) else None


@dataclass(frozen=True)
class PastRun:
    """A run's directory and the settings it was started with."""

    directory: RunDirectory
    settings: "Settings"

    @property
    def name(self) -> str:
        """Prefix of the run's topics; for an attached instance's directory, the instance's scope."""
        return scope_of(self.settings.run.name, self.settings.run.instance)

    @property
    def is_finished(self) -> bool:
        """Whether the run took its last step, by the summary that it wrote at its end."""
        try:
            steps = json.loads(self.directory.summary.read_text()).get("steps", 0)
        except (OSError, ValueError, AttributeError):
            return False
        return isinstance(steps, int) and steps >= self.settings.training.max_steps

    @property
    def weights(self) -> Path:
        """Path of the weights store, even if the directory was moved."""
        return self.directory.path / self.settings.run.weights_store.name

    @property
    def checkpoints(self) -> str | Path:
        """Location of the checkpoints, even if the directory was moved."""
        return self.settings.training.checkpoint_location or self.directory.checkpoints


def is_over(summary: Mapping[str, Any], step: int, wanted: float | None) -> bool:
    """Whether a run has taken its last step: the newest one is ``wanted`` or later, and its summary covers it."""
    # The summary of an earlier start does not cover the steps since.
    return summary.get("steps") == step and wanted is not None and step >= wanted


def open_run(path: Path) -> PastRun:
    """A run by its directory, by its name under ``runs/``, or by the configuration file it was started with.

    Raises:
        UserError: there is no resolved configuration.
    """
    from streamrl.settings.loading import load_settings

    directory = _resolved_run(path)
    settings = load_settings(path if directory is None else directory.config, [], to_look=True)
    return PastRun(directory or RunDirectory(settings.run.path), settings)


def settings_to_join(path: Path, overrides: Sequence[str]) -> "Settings":
    """Settings of a process that joins a run on this machine; ``overrides`` are options as on a command line.

    Raises:
        SettingsError: a setting is wrong, or a secret is masked in the run's configuration.
        UserError: there is no such run.
    """
    from streamrl.settings.loading import load_settings

    directory = _resolved_run(path, "; on another machine than the run's, give its configuration file instead")
    settings = load_settings(path if directory is None else directory.config, overrides)
    run = settings.run
    if directory is None or run.name != directory.path.name:
        return settings
    # A relative path in the file holds only where the run was started.
    placed = run.model_copy(update={"directory": directory.path.parent})
    return settings.model_copy(update={"run": placed})


def _resolved_run(path: Path, advice: str = "") -> RunDirectory | None:
    """The run's directory; None if the path is a configuration that a user wrote. ``advice`` ends the error's text.

    Raises:
        UserError: it is neither.
    """
    if path.is_file() and path.name != CONFIG:
        return None
    if (directory := directory_of(path)) is None:
        raise UserError(
            f"expected a run's directory with {CONFIG}, or its name under {RUNS}/, got {describe_missing_run(path)}"
            f"{advice}"
        )
    return directory


def describe_missing_run(path: Path) -> str:
    """Why a path is not a run's: it does not exist, or has no configuration. Names any runs in its ``runs/``."""
    if not path.is_dir():
        return f"{path}, which does not exist"
    there = path / RUNS
    runs = sorted(config.parent.name for config in there.glob(f"*/{CONFIG}"))
    hint = f"; runs are in {there}: {', '.join(runs)}" if runs else ""
    return f"{path}, which has none{hint}"


@contextmanager
def history_of(
    run: PastRun, export: Path | None, scratch: Path, progress: Callable[[str], None]
) -> "Iterator[History]":
    """The run's history, from an export if one is named, else from a broker.

    Raises:
        UserError: there is no such export, or no broker has the run's topics.
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
    """The address of a broker with the run's topics.

    It is the one that the settings name, else the run's own if it is running, else one started on a copy of the run's
    data in ``scratch``. With ``scratch`` None, it is started on the data itself, so that new records stay.

    Raises:
        UserError: no broker has the topics.
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
    # Last choice: the broker of `streamrl kafka up`, which may serve many runs.
    if (address := detached.running_bootstrap_servers()) is None:
        raise UserError(
            f"expected a broker with the topics of run {run.name}, found none: name it with "
            "STREAMRL_KAFKA__BOOTSTRAP_SERVERS, or read an export with --export DIR"
        )
    yield address


def _copy_node(source: Path, target: Path) -> None:
    """Copy a broker node's folder, without its locks and logs."""
    # They belong to the process that wrote them; a broker on the copy writes its own.
    ignored = shutil.ignore_patterns("tmp", "lock", ".lock", "*.log.*", "output.log", "server.log")
    shutil.copytree(source, target, ignore=ignored, copy_function=copy_sparse)


def copy_sparse(source: str, target: str) -> str:
    """Copy a file. Blocks of zeros become holes."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(CHUNK):
            # Kafka allocates 10 MB of index for each partition in advance, nearly all of it zeros.
            if chunk.count(0) == len(chunk):
                writer.seek(len(chunk), 1)
            else:
                writer.write(chunk)
        # Seeking writes nothing, so a file that ends in a hole gets its length here.
        writer.truncate()
    return target
