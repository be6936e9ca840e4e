"""Rotates the logs of a run's processes: the content of a large log moves into a numbered copy, and a few are kept.

A process keeps its log open and passes it to its children, so a renamed file would keep growing under its new name.
Instead, the content is copied and the file truncated (``copytruncate`` of logrotate). The processes open their logs for
appending, so their next line goes to the start of the file. They need not cooperate or know of the rotation.

Invariant a_log_is_bounded: a log, and so a copy, has at most ``max_bytes`` plus the bytes written between two checks.
"""

import asyncio
import shutil
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import structlog

from streamrl.bus.waiting import in_thread, wait_for_event

LOOK_EVERY_S = 5.0
MAX_BYTES = 32 << 20
"""Bytes at which a log is rotated: the hours before a failure fit, and an editor still opens it."""
BACKUP_COUNT = 3
"""Rotated copies that are kept of each log."""

log = structlog.get_logger()


@dataclass
class LogRotation:
    """Keeps each ``*.log`` in ``folder`` at about ``max_bytes``, with ``backup_count`` copies; ``.1`` is the newest."""

    folder: Path
    max_bytes: int = MAX_BYTES
    backup_count: int = BACKUP_COUNT
    look_every_s: float = LOOK_EVERY_S
    _failing: set[Path] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        """Check the logs periodically.

        Consumes: sizes of files. Produces: copies.
        Waits for: its interval.
        On failure: warns once per log and tries again; a log is truncated only after it was copied.
        On stop: returns at once.
        """
        while not stop.is_set():
            await in_thread(self.look)
            await wait_for_event(stop, self.look_every_s)

    def look(self) -> None:
        """Rotate the logs that exceed the size."""
        for path in sorted(self.folder.glob("*.log")):
            try:
                if path.stat().st_size > self.max_bytes:
                    rotate(path, self.backup_count)
                self._failing.discard(path)
            except OSError as error:
                if path not in self._failing:
                    log.warning("a log cannot be rotated and keeps growing", log=str(path), error=str(error))
                self._failing.add(path)


def rotate(path: Path, backup_count: int) -> None:
    """Move a log's content into the first of ``backup_count`` numbered copies; the oldest copy is deleted.

    Bytes that a process writes between the end of the copying and the truncation, some microseconds, are lost.

    Raises:
        OSError: the log cannot be copied; it is not changed.
    """
    copies = [path.with_name(f"{path.name}.{number}") for number in range(1, backup_count + 1)]
    with path.open("r+b") as file:
        if copies:
            # The oldest copy is deleted first, because the new one may need its disk space.
            copies[-1].unlink(missing_ok=True)
            for newer, older in reversed(list(pairwise(copies))):
                if newer.exists():
                    newer.rename(older)
            try:
                with copies[0].open("wb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            except OSError:
                copies[0].unlink(missing_ok=True)
                raise
        file.truncate(0)
