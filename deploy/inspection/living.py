"""Whether a run's own broker runs, told from its folders alone: no broker is asked, and next to nothing is imported."""

import fcntl
import re
from pathlib import Path

from deploy.runs.directory import RunDirectory

RUNS = Path("runs")
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
                fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if (match := _LISTENER.search(properties.read_text())) is not None:
                    addresses.append(match[1])
    return ",".join(addresses) if len(addresses) == len(nodes) else None
