"""Tests that are bounded by what they do, and not by a clock that runs while others hold the processors.

A part of a test fails once all its processes together have stood still, or when they have used more processor time
than anything it is meant to do. How long it takes beside others, or on a machine that never ran it, is no matter.

Shorter bounds, in seconds, use a clock that pauses while any process waits for a processor (``calm_s``). ``within`` and
``patience`` bound a wait by it.
"""

import asyncio
import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil
import pytest

LOOK_S = 2.0
STILL_S, STILL_CPU_S = 180.0, 2.0
"""Processes that use less processor time than this, in so long, wait for something that does not come.

One that computes gets ten times as much beside seven busy processes of higher priority on two cores.
"""
MOST_CPU_S = 900.0
"""The dearest part uses a tenth."""
PRESSURE = Path("/proc/pressure/cpu")
"""Linux's pressure stall information: how long any process of the machine has waited for a processor."""

T = TypeVar("T")


def calm_s() -> float:
    """Seconds on a clock that pauses while any process of the machine waits for a processor.

    Where the kernel does not report that, it is an ordinary clock.
    """
    try:
        some = PRESSURE.read_text().split("\n", 1)[0]
    except OSError:
        return time.monotonic()
    return time.monotonic() - int(some.rsplit("total=", 1)[1]) / 1e6


@contextlib.asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """``asyncio.timeout`` by ``calm_s``: for what needs a processor to come true.

    Raises:
        TimeoutError: the block took longer.
    """
    loop, began = asyncio.get_running_loop(), calm_s()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            if (left := began + seconds - calm_s()) > 0:
                timer = loop.call_later(max(left, 0.05), look)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            timer.cancel()


async def within(awaited: Awaitable[T], seconds: float) -> T:
    """``asyncio.wait_for`` by ``calm_s``.

    Raises:
        TimeoutError: it took longer, and is cancelled.
    """
    async with patience(seconds):
        return await awaited


class ProcessorTime:
    """Seconds that this process and all below it have used, those that have ended included."""

    def __init__(self) -> None:
        self._used: dict[psutil.Process, float] = {}

    def look(self) -> float:
        """So far; what a process uses between the last look and its end is not seen."""
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._used[process] = times.user + times.system
        return sum(self._used.values())


class Progress:
    """What has become of a part of a test since it began, by the processor time that ``used`` tells in seconds."""

    def __init__(self, used: Callable[[], float], still_s: float, still_cpu_s: float, most_cpu_s: float) -> None:
        self._used, self._began_at = used, used()
        self._still_s, self._still_cpu_s, self._most_cpu_s = still_s, still_cpu_s, most_cpu_s
        self._seen = deque([(time.monotonic(), self._began_at)])

    def why_to_end(self) -> str | None:
        """Look again; why there is nothing to wait for any more, if so."""
        now, used = time.monotonic(), self._used()
        self._seen.append((now, used))
        while now - self._seen[1][0] >= self._still_s:
            self._seen.popleft()
        since, before = self._seen[0]
        if used - self._began_at > self._most_cpu_s:
            return f"expected an end within {self._most_cpu_s:.0f} s of processor time, got none"
        if now - since >= self._still_s and used - before < self._still_cpu_s:
            return f"expected progress, got {used - before:.1f} s of processor time in {now - since:.0f} s"
        return None


@contextlib.contextmanager
def bounded_by_progress(
    still_s: float = STILL_S, still_cpu_s: float = STILL_CPU_S, most_cpu_s: float = MOST_CPU_S, look_s: float = LOOK_S
) -> Iterator[None]:
    """Interrupt the main thread with a failure when the block makes no progress."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    progress = Progress(ProcessorTime().look, still_s, still_cpu_s, most_cpu_s)

    def look(_number: int, _frame: FrameType | None) -> None:
        if (why := progress.why_to_end()) is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            pytest.fail(f"{why}; {_processes()}")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, look_s, look_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _processes() -> str:
    told = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            told.append(f"{process.pid} {process.name()} {process.status()}")
    return f"processes: {', '.join(told) or 'none'}"
