"""Virtual time: it does not advance while code runs, and jumps to the next event that is due.

``Agenda`` is the clock of all simulations. ``Events`` runs events without asyncio, for simulations that do not use a
run's real roles. ``VirtualLoop`` is an asyncio event loop with one thread, no sockets, and the same order of callbacks
each time. It runs calls for a thread pool in the loop. It uses asyncio's internal queue of callbacks, since no public
interface gives their order. A simulation that can never continue raises ``Stuck``.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Generic, TypeVar

START = 1_000_000.0
"""Virtual seconds at the start: far from 0, to expose code that takes 0 for "never"."""
SPIN = 20_000
"""Number of callbacks at one moment of virtual time after which a loop counts as spinning."""
SWEEPS = 20
"""Most rounds of cancelling at the end: a task may start another one while it is cancelled."""


class Stuck(Exception):
    """The simulation cannot continue: a deadlock, a spinning loop, or a limit on time or work was exceeded."""


T = TypeVar("T")


class Agenda(Generic[T]):
    """Entries by due time, the earliest first; among equal times, the one added first. ``now``: virtual seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._entries: list[tuple[float, int, T]] = []
        self._serial = count()

    @property
    def next_at(self) -> float:
        """Virtual time of the next entry; infinity if there is none."""
        return self._entries[0][0] if self._entries else inf

    def at(self, when: float, what: T) -> None:
        """Add an entry for a virtual time."""
        heappush(self._entries, (when, next(self._serial), what))

    def first(self) -> T | None:
        """The next entry; None if there is none."""
        return self._entries[0][2] if self._entries else None

    def pop(self) -> T:
        """Remove and return the next entry, without changing the time."""
        return heappop(self._entries)[2]


class Events(Agenda[Callable[[], None]]):
    """An agenda of functions to call at their times. ``done``: number of calls so far."""

    done = 0

    def run(self, is_over: Callable[[], bool], most: float = inf) -> None:
        """Call the functions, one after the other, until ``is_over``.

        Raises:
            Stuck: no function is left, or more than ``most`` were called.
        """
        while not is_over():
            if self.next_at == inf:
                raise Stuck(f"deadlock: nothing is left to do at {self.now:.3f} s")
            self.now = self.next_at
            self.pop()()
            self.done += 1
            if self.done > most:
                raise Stuck(f"not finished after {self.done} events")


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio event loop in virtual time.

    Limits: ``max_seconds`` of virtual time, ``max_callbacks`` in total, and ``max_at_once`` at one moment.
    """

    def __init__(
        self, *, max_seconds: float = 3600.0, max_callbacks: float = 2_000_000, max_at_once: float = SPIN
    ) -> None:
        super().__init__()
        # asyncio's own heap orders timers only by time, not by when they were set.
        self._agenda: Agenda[asyncio.TimerHandle] = Agenda(START)
        self._limit = START + max_seconds
        self._max_callbacks = max_callbacks
        self._max_at_once = max_at_once
        self._thread = threading.get_ident()
        self._at_this_moment = 0
        self.callbacks = 0

    def time(self) -> float:
        """Virtual seconds."""
        return self._agenda.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call at the next turn."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call after ``delay`` virtual seconds."""
        return self.call_at(self._agenda.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a virtual time; of several timers for one time, the one set first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._agenda.at(when, timer)
        return timer

    def _run_once(self) -> None:
        ready, agenda = self._ready, self._agenda  # type: ignore[attr-defined]
        # Time does not advance while a callback is ready: work itself takes no virtual time.
        if not ready:
            while (timer := agenda.first()) is not None and timer.cancelled():
                agenda.pop()
            # This loop has no sockets or threads that could wake it.
            if timer is None:
                raise Stuck("deadlock: nothing is ready and no timer is set")
            self._jump(agenda.next_at)
        while agenda.next_at <= agenda.now:
            ready.append(agenda.pop())
        # As in asyncio, callbacks that become ready now run in the next round.
        count = len(ready)
        self._count(count)
        for _ in range(count):
            handle = ready.popleft()
            if not (handle.cancelled() or self._is_held_back(handle)):
                handle._run()  # noqa: SLF001

    def _is_held_back(self, handle: asyncio.Handle) -> bool:
        """For subclasses: whether a callback must not run now; then the subclass keeps it."""
        return False

    def _jump(self, when: float) -> None:
        if when > self._agenda.now:
            self._agenda.now, self._at_this_moment = when, 0
        if self._agenda.now > self._limit:
            raise Stuck(f"not finished after {self._agenda.now - START:.0f} s of virtual time")

    def _count(self, callbacks: int) -> None:
        self.callbacks += callbacks
        self._at_this_moment += callbacks
        if self._at_this_moment > self._max_at_once:
            raise Stuck(f"spinning: {self._at_this_moment} callbacks at {self._agenda.now - START:.3f} s")
        if self.callbacks > self._max_callbacks:
            raise Stuck(f"not finished after {self.callbacks} callbacks")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are dropped when their time comes."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Call the function at the next turn, in the loop's own thread instead of the executor."""
        future = self.create_future()
        self.call_soon(self._call_into, future, func, args)
        return future

    def _call_into(self, future: "asyncio.Future[Any]", func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = func(*args)
        except Exception as error:  # the error is raised in the caller that awaits the future
            # The future is done already if its caller was cancelled.
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """The same as ``call_soon``; must not be called from another thread."""
        assert threading.get_ident() == self._thread, "a simulated process has no threads"
        return self.call_soon(callback, *args, context=context)

    def sweep(self) -> None:
        """Cancel and end all remaining tasks, so that no coroutine is destroyed half-way. Time limits do not apply."""
        # The simulation may have ended at one of its limits; cancelled tasks need time beyond it.
        self._limit = inf
        self._max_callbacks += 1_000_000
        self.set_exception_handler(lambda _loop, _context: None)
        for _ in range(SWEEPS):
            left = asyncio.all_tasks(self)
            if not left:
                break
            for task in left:
                task.cancel()
            self._at_this_moment = 0
            try:
                self.run_until_complete(asyncio.wait(left, timeout=60.0))
            except Stuck:  # a task that still waits after being cancelled gets another round
                continue
        self.run_until_complete(self.shutdown_asyncgens())


L = TypeVar("L", bound=VirtualLoop)


@contextmanager
def sweeping(loop: L) -> Iterator[L]:
    """Use a loop for one simulation; at the end, remaining tasks are cancelled and the loop is closed."""
    try:
        yield loop
    finally:
        loop.sweep()
        loop.close()
