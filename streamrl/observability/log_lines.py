"""Turns events into log lines: safe for terminals, protected from floods, and never a reason to fail.

Invariants:
- printed_text_cannot_control_the_terminal: a line holds no control character (see ``schemas.plain_text``);
- a_library_cannot_flood: each place in a library's code gets one line in ten seconds, which counts the dropped ones;
- a_full_disk_costs_lines_only: a line that cannot be written is dropped, and its writer goes on.
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
"""Seconds between two lines of one place: without a broker aiokafka logs hundreds of refused connections a second."""
_TRACEBACKS = ("exception", "stack")
"""Fields that may have several lines."""


def printable(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A structlog processor that escapes the control characters in every text of an event."""
    for name, value in event.items():
        if not isinstance(value, bool | int | float | None):
            text = value if isinstance(value, str) else str(value)
            if not text.isprintable():
                event[name] = plain_text(text, keep="\n\t" if name in _TRACEBACKS else "")
    return event


class LinePrinter:
    """A structlog logger that prints to the current ``sys.stdout`` and survives a full disk.

    ``copy``: descriptor of a file, opened for appending, that gets every line as well.
    """

    _lock = threading.Lock()

    def __init__(self, copy: int | None = None) -> None:
        self._copy = copy

    def msg(self, message: str) -> None:
        """Print a line; drop it if it cannot be written."""
        with self._lock:
            with suppress(OSError):
                # In one piece, so that the lines of processes that share a file do not mix.
                sys.stdout.write(message + "\n")
                sys.stdout.flush()
            if self._copy is not None:
                with suppress(OSError):
                    os.write(self._copy, f"{message}\n".encode(errors="replace"))

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def line_printer(copy: Path | None = None) -> Callable[..., LinePrinter]:
    """A factory of ``LinePrinter``. All of them also write to the file ``copy``, if it can be opened."""
    file = None
    if copy is not None:
        with suppress(OSError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Stays open as long as the process runs, like standard output.
            file = os.open(copy, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    return lambda *_: LinePrinter(file)


def forget_unwritten() -> None:
    """Discard unwritten output. Call it as a process ends: else a full disk would turn the exit code into 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # Python flushes again on exit; the rest then goes to /dev/null.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LibraryLines(logging.Handler):
    """Writes libraries' log records as our lines, for each place in their code at most once in ``every_s`` seconds."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        # By place, not by text, which differs each time. There are few places, so this stays small.
        self._written: dict[tuple[str, int], tuple[float, int]] = {}
        self._log = structlog.get_logger()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it as dropped."""
        place, now = (record.pathname, record.lineno), self._clock()
        written_at, dropped = self._written.get(place, (float("-inf"), 0))
        if now - written_at < self._every_s:
            self._written[place] = written_at, dropped + 1
            return
        self._written[place] = now, 0
        more: dict[str, Any] = {"repeated": dropped} if dropped else {}
        if record.exc_info:
            more["exc_info"] = record.exc_info
        write = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        write(record.getMessage(), logger=record.name, **more)
