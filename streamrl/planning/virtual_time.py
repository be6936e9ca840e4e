"""Virtual time: it stands still while anything is done, and jumps to whatever is due next.

``Agenda`` is the clock of all that is simulated. ``Events`` does what is due without asyncio, where no role of a run is
simulated as it is. ``VirtualLoop`` is an asyncio event loop: one thread, no sockets, and the same order of callbacks
each time; what is meant for a thread pool is called in the loop. It reaches into asyncio's own queue of callbacks,
whose order no public interface gives. What can never go on says so.
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
"""Virtual seconds at the beginning: far from 0, so that code that takes 0 for "never" is found out."""
SPIN = 20_000
"""Callbacks at one moment of virtual time after which a loop counts as spinning."""
SWEEPS = 20
"""Rounds of cancelling at the end: a task may start another one while it is cancelled."""


class Stuck(Exception):
    """The simulation cannot go on: a deadlock, a spinning loop, or a bound of time or work was passed."""


T = TypeVar("T")


class Agenda(Generic[T]):
    """What is due when: the earliest first, and of one moment what was put down first. ``now``: virtual seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._entries: list[tuple[float, int, T]] = []
        self._serial = count()

    @property
    def next_at(self) -> float:
        """When what is next is due; infinity if nothing is."""
        return self._entries[0][0] if self._entries else inf

    def at(self, when: float, what: T) -> None:
        """Put something down for a moment."""
        heappush(self._entries, (when, next(self._serial), what))

    def first(self) -> T | None:
        """What is next, if anything is."""
        return self._entries[0][2] if self._entries else None

    def pop(self) -> T:
        """Take out what is next; time stays."""
        return heappop(self._entries)[2]


class Events(Agenda[Callable[[], None]]):
    """An agenda of what is done at its moment. ``done``: so many were."""

    done = 0

    def run(self, is_over: Callable[[], bool], most: float = inf) -> None:
        """Do what is due, one after the other, until it is over.

        Raises:
            Stuck: nothing is left to do, or more was done than that.
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
    """Bounded by ``max_seconds`` of virtual time, and ``max_callbacks`` in all, ``max_at_once`` at one moment."""

    def __init__(
        self, *, max_seconds: float = 3600.0, max_callbacks: float = 2_000_000, max_at_once: float = SPIN
    ) -> None:
        super().__init__()
        # asyncio's own heap orders timers by time alone.
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
        """At the next turn."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """After so many virtual seconds."""
        return self.call_at(self._agenda.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """At a virtual time; of several at the same time, the one that was set first comes first."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._agenda.at(when, timer)
        return timer

    def _run_once(self) -> None:
        ready, agenda = self._ready, self._agenda  # type: ignore[attr-defined]
        # Time stands still while anything can run: work itself takes no virtual time.
        if not ready:
            while (timer := agenda.first()) is not None and timer.cancelled():
                agenda.pop()
            # Sockets and threads, which could wake a real loop, are none of this one's.
            if timer is None:
                raise Stuck("deadlock: nothing is ready and no timer is set")
            self._jump(agenda.next_at)
        while agenda.next_at <= agenda.now:
            ready.append(agenda.pop())
        # As in asyncio: what these callbacks make ready has to wait for the next round.
        count = len(ready)
        self._count(count)
        for _ in range(count):
            handle = ready.popleft()
            if not (handle.cancelled() or self._is_held_back(handle)):
                handle._run()  # noqa: SLF001

    def _is_held_back(self, handle: asyncio.Handle) -> bool:
        """For subclasses: whether a callback must not run now; it is theirs to keep."""
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
        """Cancelled timers are dropped when their time comes."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Call it at the next turn, in the one thread there is, whatever pool it is meant for."""
        future = self.create_future()
        self.call_soon(self._call_into, future, func, args)
        return future

    def _call_into(self, future: "asyncio.Future[Any]", func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = func(*args)
        except Exception as error:  # whatever the call raises belongs to whoever waits for it
            # Whoever waited may have been cancelled meanwhile, and the future with it.
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As ``call_soon``; refused from another thread."""
        assert threading.get_ident() == self._thread, "a simulated process has no threads"
        return self.call_soon(callback, *args, context=context)

    def sweep(self) -> None:
        """End every task that is left, without bounds of time, so that no coroutine is destroyed half-way."""
        # The simulation may have ended at one of its bounds; tasks that are cancelled need room beyond them.
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
            except Stuck:  # a task that waits on in spite of being cancelled gets another round
                continue
        self.run_until_complete(self.shutdown_asyncgens())


L = TypeVar("L", bound=VirtualLoop)


@contextmanager
def sweeping(loop: L) -> Iterator[L]:
    """Use a loop for one simulation; what is left in it at the end is cancelled and closed."""
    try:
        yield loop
    finally:
        loop.sweep()
        loop.close()
