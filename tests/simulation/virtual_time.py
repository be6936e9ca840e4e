"""An asyncio event loop whose time is virtual: it jumps to the next timer when nothing is ready.

Callbacks belong to the simulated process in whose context they were scheduled. A killed process never runs again, not
even its ``finally`` blocks; those of a stopped one wait until it is resumed. One thread, and the same order each time.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any

START = 1_000_000.0
SPIN = 20_000
"""Callbacks at one moment of virtual time after which the loop counts as spinning."""


class Stuck(Exception):
    """The simulation cannot go on: a deadlock, a spinning loop, or a bound of time or work was passed."""


class Killed(BaseException):
    """Raised inside a simulated process at the point where it was killed; nothing in it may handle this."""


@dataclass(eq=False)
class Process:
    """A simulated process: what its callbacks are tagged with."""

    name: str
    is_dead: bool = False
    is_stopped: bool = False
    held: "list[asyncio.Handle]" = field(default_factory=list)

    @property
    def is_frozen(self) -> bool:
        """Whether its callbacks must not run now."""
        return self.is_dead or self.is_stopped


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
OUTSIDE = Context()
"""The context of what belongs to no process: the broker and the network."""


class VirtualLoop(asyncio.BaseEventLoop):
    """``max_seconds`` of virtual time and ``max_callbacks`` bound a simulation."""

    def __init__(self, *, max_seconds: float = 3600.0, max_callbacks: int = 2_000_000) -> None:
        super().__init__()
        self._now = START
        self._limit = START + max_seconds
        self._max_callbacks = max_callbacks
        self._thread = threading.get_ident()
        self._at_this_moment = 0
        self.callbacks = 0
        self.has_frozen = False
        self._dead: list[Process] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._sequence = 0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """At the next turn."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """After so many virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """At a virtual time; of several at the same time, the one that was set first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._sequence += 1
        heapq.heappush(self._timers, (when, self._sequence, timer))
        return timer

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stuck("deadlock: nothing is ready and no timer is set")
            self._jump(timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        count = len(ready)
        self._count(count)
        for _ in range(count):
            handle = ready.popleft()
            if not (handle._cancelled or (self.has_frozen and _is_held(handle))):
                handle._run()

    def _jump(self, when: float) -> None:
        if when > self._now:
            self._now, self._at_this_moment = when, 0
        if self._now > self._limit:
            raise Stuck(f"not finished after {self._now - START:.0f} s of virtual time")

    def _count(self, callbacks: int) -> None:
        self.callbacks += callbacks
        self._at_this_moment += callbacks
        if self._at_this_moment > SPIN:
            raise Stuck(f"spinning: {self._at_this_moment} callbacks at {self._now - START:.3f} s")
        if self.callbacks > self._max_callbacks:
            raise Stuck(f"not finished after {self.callbacks} callbacks")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Call it at the next turn, in the one thread there is."""
        assert executor is None, "a simulated process has no threads"
        future = self.create_future()
        self.call_soon(_call_into, future, func, args)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As ``call_soon``; refused from another thread."""
        assert threading.get_ident() == self._thread, "a simulated process has no threads"
        return self.call_soon(callback, *args, context=context)

    def freeze(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.is_stopped = True
        self.has_frozen = True

    def thaw(self, process: Process) -> None:
        """Let a stopped process go on, as SIGCONT does."""
        process.is_stopped = False
        self._ready.extend(process.held)  # type: ignore[attr-defined]
        process.held.clear()

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does."""
        process.is_dead = True
        self.has_frozen = True
        self._dead.append(process)

    def raise_the_dead(self) -> None:
        """Let killed processes run again, when nothing that they do matters any more, so that they can be tidied up."""
        self.has_frozen = False
        for process in self._dead:
            self._ready.extend(process.held)  # type: ignore[attr-defined]
            process.held.clear()


def _is_held(handle: asyncio.Handle) -> bool:
    process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    if process is None or not process.is_frozen:
        return False
    process.held.append(handle)
    return True


def _call_into(future: "asyncio.Future[Any]", func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = func(*args)
    except Killed:
        return
    except Exception as error:
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


@contextmanager
def virtual_loop(**bounds: Any) -> Iterator[VirtualLoop]:
    """A loop for one simulation; what is left in it at the end is cancelled and closed."""
    loop = VirtualLoop(**bounds)
    try:
        yield loop
    finally:
        _sweep(loop)
        loop.close()


def _sweep(loop: VirtualLoop) -> None:
    """End every task that is left, frozen ones too, so that no coroutine is destroyed half-way."""
    loop.raise_the_dead()
    loop._limit = float("inf")
    loop._max_callbacks += 1_000_000
    loop.set_exception_handler(lambda _loop, _context: None)
    for _ in range(20):
        left = asyncio.all_tasks(loop)
        if not left:
            break
        for task in left:
            task.cancel()
        loop._at_this_moment = 0
        try:
            loop.run_until_complete(asyncio.wait(left, timeout=60.0))
        except Stuck:
            continue
    loop.run_until_complete(loop.shutdown_asyncgens())
