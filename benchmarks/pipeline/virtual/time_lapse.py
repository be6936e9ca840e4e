"""An asyncio event loop in virtual time: where others would wait for a timer, it is already later.

One thread: calls for an executor are made at once. There are no sockets to wait for, so a loop with nothing to do and
no timer set is stuck, and says so.
"""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
START_S = 1_000_000.0


class _Jump(selectors.SelectSelector):
    """Turns the time for which the loop would sleep into time that has passed."""

    now = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing ever becomes ready but timers."""
        if timeout is None:
            raise RuntimeError("expected a timer or a callback, got neither: everybody waits for somebody")
        self.now += max(0.0, timeout)
        return []


class TimeLapse(asyncio.SelectorEventLoop):
    """``time`` is virtual; it begins at ``START_S``."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jump.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Call it now."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whatever the call raises belongs to whoever waits for it
            future.set_exception(error)
        return future
