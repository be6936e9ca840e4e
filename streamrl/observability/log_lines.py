"""What turns events into the lines of our logs: nothing in them is obeyed, nothing floods them, nothing fails for them.

Invariants:
- printed_text_cannot_control_the_terminal: a line holds no control character (see ``schemas.plain_text``);
- a_library_cannot_flood: of one place in a library's code there is a line every ten seconds, which counts the others;
- a_full_disk_costs_lines_only: what cannot be written is dropped, and its writer goes on.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from streamrl.schemas.plain_text import plain_text

EVERY_S = 10.0
"""Without a broker aiokafka reports several hundred refused connections a second."""
_TRACEBACKS = ("exception", "stack")
"""Fields that have lines of their own."""


def printable(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A processor: every text of an event with what a terminal would obey written out."""
    for name, value in event.items():
        if not isinstance(value, bool | int | float | None):
            text = value if isinstance(value, str) else str(value)
            if not text.isprintable():
                event[name] = plain_text(text, keep="\n\t" if name in _TRACEBACKS else "")
    return event


class LinePrinter:
    """A structlog logger that prints to standard output as it is at that moment, and survives a full disk.

    ``copy``: the descriptor of a file, opened for appending, that gets every line as well.
    """

    _lock = threading.Lock()

    def __init__(self, copy: int | None = None) -> None:
        self._copy = copy

    def msg(self, message: str) -> None:
        """Print a line, or lose it."""
        with self._lock:
            with suppress(OSError):
                # In one piece, so that lines of several processes with one file do not mix.
                sys.stdout.write(message + "\n")
                sys.stdout.flush()
            if self._copy is not None:
                with suppress(OSError):
                    os.write(self._copy, f"{message}\n".encode(errors="replace"))

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def line_printer(copy: Path | None = None) -> Callable[..., LinePrinter]:
    """A factory of ``LinePrinter``, all of which print into the same copy, if that file can be opened."""
    file = None
    if copy is not None:
        with suppress(OSError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Open as long as the process is, like standard output.
            file = os.open(copy, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    return lambda *_: LinePrinter(file)


def forget_unwritten() -> None:
    """Call as a process ends: what standard output could not take would turn its exit code into 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # Python flushes once more on leaving; what is left goes nowhere then.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LibraryLines(logging.Handler):
    """Writes what libraries log as lines of ours, one place in their code at most once in ``every_s``."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        # By place and not by text, which differs each time. There are only so many places, so this stays small.
        self._told: dict[tuple[str, int], tuple[float, int]] = {}
        self._log = structlog.get_logger()

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, or count it."""
        place, now = (record.pathname, record.lineno), self._clock()
        told_at, held_back = self._told.get(place, (float("-inf"), 0))
        if now - told_at < self._every_s:
            self._told[place] = told_at, held_back + 1
            return
        self._told[place] = now, 0
        more: dict[str, Any] = {"repeated": held_back} if held_back else {}
        if record.exc_info:
            more["exc_info"] = record.exc_info
        write = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        write(record.getMessage(), logger=record.name, **more)
