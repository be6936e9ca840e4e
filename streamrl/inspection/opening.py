"""Opens the index of a run's records."""

import sqlite3
from pathlib import Path

import structlog
import xxhash

from streamrl.bus.embedded.runtime import cache_root
from streamrl.inspection.source import PastRun
from streamrl.observability.record_index.store import RecordIndex
from streamrl.settings.run_directory import RunDirectory

log = structlog.get_logger()


def index_of(run: PastRun) -> RecordIndex:
    """The index of a run whose directory is on this machine."""
    return open_index(run.directory.path, run.settings.kafka.bootstrap_servers or "", run.name)


def open_index(directory: Path | None, address: str, run: str) -> RecordIndex:
    """A run's index: in its directory if that is on this machine, else in the cache, for the broker at this address.

    It is in memory if neither can be written.
    """
    cached = cache_root() / "indexes" / f"{run}-{xxhash.xxh3_64_hexdigest(f'{address}/{run}'.encode())}.sqlite"
    # A command that only reads a run must not create its directory.
    own = [RunDirectory(directory).record_index] if directory is not None and directory.is_dir() else []
    for path in (*own, cached):
        try:
            if path is cached:
                path.parent.mkdir(parents=True, exist_ok=True)
            return RecordIndex(path)
        except (OSError, sqlite3.OperationalError) as error:
            log.debug("an index cannot be kept here", path=str(path), error=str(error))
    return RecordIndex(None)
