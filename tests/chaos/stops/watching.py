"""What a role leaves behind in its process: calls in threads, tasks, threads, descriptors, and errors nobody asked for.

Everything that a role starts bears its mark, a context variable, so that what the load around it does is not counted.
"""

import asyncio
import gc
import logging
import os
import sqlite3
import sys
import threading
import time
import traceback
import warnings
import weakref
from asyncio import base_events
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, TextIO
from unittest import mock

import structlog

ROLE = "role"
OWNER: ContextVar[str] = ContextVar("owner", default="")
"""``ROLE`` in all that the role under test starts."""
LONGEST_CALL_S = 0.03
"""Of a slow disk: so long a call in a thread takes more, half of it before and half of it behind what it does."""
OF_LIBRARIES = {"BufferedReader.close"}
"""Calls in threads that nobody waits for, and that touch nothing of ours: aiohttp closes a file that it has sent."""
LONGEST_STATEMENT_S, STEPS_OF_SQL = 0.002, 50
"""So long may so many instructions of sqlite's take more."""
GRACE_S = 2.0
"""For threads and descriptors of what has been closed: they go on for a moment."""


class SlowThreads:
    """Every call that a role makes in a thread takes longer, by chance, and is counted while a thread is at it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.under_way: list[str] = []
        self._submit = ThreadPoolExecutor.submit

    def submit(self, executor: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        name = _name_of(call)
        if OWNER.get() != ROLE or name in OF_LIBRARIES:
            return self._submit(executor, call, *args, **kwargs)
        pause_s = self.random.uniform(0, LONGEST_CALL_S) / 2

        def slowly() -> Any:
            self.under_way.append(name)
            try:
                time.sleep(pause_s)
                found = call(*args, **kwargs)
                time.sleep(pause_s)
                return found
            finally:
                self.under_way.remove(name)

        made: Future[Any] = self._submit(executor, slowly)
        return made

    @contextmanager
    def patched(self) -> Iterator[None]:
        def submit(executor: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return self.submit(executor, call, *args, **kwargs)

        with mock.patch.object(ThreadPoolExecutor, "submit", submit):
            yield


@contextmanager
def slow_sql(random: Random) -> Iterator[None]:
    """Whatever a role does with sqlite takes longer, in the middle of a statement: as on a slow disk."""
    connect = sqlite3.connect

    def slowly() -> int:
        time.sleep(random.uniform(0, LONGEST_STATEMENT_S))
        return 0

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        made: sqlite3.Connection = connect(*args, **kwargs)
        if OWNER.get() == ROLE:
            made.set_progress_handler(slowly, STEPS_OF_SQL)
        return made

    with mock.patch.object(sqlite3, "connect", connected):
        yield


def _name_of(call: Any) -> str:
    """The innermost name of what is called, through partials and closures."""
    for _ in range(8):
        inner = getattr(call, "args", None) or [
            cell.cell_contents
            for cell in getattr(call, "__closure__", None) or ()
            if _is_set(cell) and callable(cell.cell_contents)
        ]
        inner = [one for one in inner if callable(one)]
        if not inner:
            break
        call = inner[0]
    return str(getattr(call, "__qualname__", call))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class Marks:
    """Which tasks the role made."""

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
            task = asyncio.Task(coroutine, loop=loop, **options)
            self._owners[task] = OWNER.get()
            return task

        loop.set_task_factory(make)

    def left(self) -> list[str]:
        """Tasks of the role that still run."""
        mine = [task for task in asyncio.all_tasks() if self._owners.get(task) == ROLE]
        return [f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '')}" for task in mine]


class Complaints(logging.Handler):
    """Whatever Python or a library says went wrong, with nobody to ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._late = 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback" in record.getMessage():
            self.found.append(f"logged by {record.name}: {record.getMessage()[:300]} {_told(record.exc_info)}")

    def _structured(self, _logger: Any, _name: str, event: Any) -> Any:
        if event.get("exc_info"):
            self.found.append(f"logged: {event.get('event')} {_told(event['exc_info'])}")
        raise structlog.DropEvent

    def of_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        where = "" if error is None else _told((type(error), error, error.__traceback__))
        self.found.append(
            f"loop: {context.get('message')} {context.get('future') or context.get('task') or ''} {where}"
        )

    def _count_late(self) -> Any:
        """CPython up to 3.11 forgets to close a connection that is accepted while its server closes."""
        attach = base_events.Server._attach  # type: ignore[attr-defined]

        def attached(server: Any) -> None:
            self._late += server._sockets is None
            attach(server)

        return mock.patch.object(base_events.Server, "_attach", attached)

    def _forgive_late(self) -> None:
        for kind in ("ResourceWarning: unclosed <socket", "ResourceWarning: unclosed transport"):
            for one in [one for one in self.found if one.startswith(kind)][: self._late]:
                self.found.remove(one)

    @contextmanager
    def listening(self) -> Iterator[None]:
        before, root = structlog.get_config(), logging.getLogger()
        level = root.level

        def warned(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            self.found.append(f"{category.__name__}: {message} ({os.path.basename(filename)}:{lineno})")

        def unraisable(told: Any) -> None:
            what = _told((told.exc_type, told.exc_value, told.exc_traceback))
            self.found.append(f"unraisable: {told.err_msg or ''} {told.object!r:.200} {what}")

        def in_thread(told: Any) -> None:
            self.found.append(f"thread: {_told((told.exc_type, told.exc_value, told.exc_traceback))}")

        structlog.configure(processors=[self._structured], cache_logger_on_first_use=False)
        root.addHandler(self)
        root.setLevel(logging.WARNING)
        try:
            with (
                warnings.catch_warnings(),
                mock.patch.object(sys, "unraisablehook", unraisable),
                mock.patch.object(threading, "excepthook", in_thread),
                self._count_late(),
            ):
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", ResourceWarning)
                warnings.simplefilter("always", RuntimeWarning)
                warnings.showwarning = warned
                yield
                gc.collect()
                self._forgive_late()
        finally:
            root.removeHandler(self)
            root.setLevel(level)
            structlog.configure(**before)


def _told(info: Any) -> str:
    if not isinstance(info, tuple) or info[1] is None:
        return "" if info is None else str(info)
    at = traceback.extract_tb(info[2])[-3:]
    return f"{info[1]!r:.300} at {' < '.join(f'{os.path.basename(one.filename)}:{one.lineno}' for one in reversed(at))}"


def descriptors() -> dict[int, str]:
    """Open ones, and what they are of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that listed them
    return found


def soon(left: Callable[[], list[str]]) -> list[str]:
    """What is left once what has been closed has had a moment."""
    deadline = time.monotonic() + GRACE_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
