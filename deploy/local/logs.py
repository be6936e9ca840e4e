"""Keeps the logs of a run's processes small: a log that has grown large becomes a numbered copy, of which few are kept.

A process holds its log open from its start on, and hands it to its own children, so a file that is renamed would grow
on under its new name. The content is copied instead, and the file is cut to nothing (``copytruncate`` of logrotate):
all of them append, so that their next line stands at its beginning. No process notices, and none depends on this one.

Invariant a_log_is_bounded: it holds ``max_bytes`` and what is written between two looks, and its copies no more.
"""

import asyncio
import shutil
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import structlog

from streamrl.bus.waiting import happens_within, in_thread

LOOK_EVERY_S = 5.0

log = structlog.get_logger()


@dataclass
class LogRotation:
    """Of every ``*.log`` in ``folder``: at most ``max_bytes``, and ``backup_count`` copies, ``.1`` being the newest."""

    folder: Path
    max_bytes: int
    backup_count: int
    look_every_s: float = LOOK_EVERY_S
    _told: set[Path] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        """Look at the logs now and then.

        Consumes: sizes of files. Produces: copies.
        Waits for: its interval.
        On failure: told once a log, which is looked at again; nothing is cut off that could not be copied.
        On stop: returns at once.
        """
        while not stop.is_set():
            await in_thread(self.look)
            await happens_within(stop, self.look_every_s)

    def look(self) -> None:
        """Rotate what has grown beyond its size."""
        for path in sorted(self.folder.glob("*.log")):
            try:
                if path.stat().st_size > self.max_bytes:
                    rotate(path, self.backup_count)
                self._told.discard(path)
            except OSError as error:
                if path not in self._told:
                    log.warning("a log cannot be rotated and grows on", log=str(path), error=str(error))
                self._told.add(path)


def rotate(path: Path, backup_count: int) -> None:
    """Move the content into the first of ``backup_count`` numbered copies; the oldest is deleted.

    What is written between the last look at its end and the cut, some microseconds later, is lost.

    Raises:
        OSError: it cannot be copied, and stays as it is.
    """
    copies = [path.with_name(f"{path.name}.{number}") for number in range(1, backup_count + 1)]
    with path.open("r+b") as file:
        if copies:
            # First of all, since it may be the room that the new copy needs.
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
