"""Simulated processes in virtual time: callbacks belong to the process in whose context they were scheduled.

A killed process never runs again, not even its ``finally`` blocks; those of a stopped one wait until it is resumed.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any

from streamrl.planning.virtual_time import VirtualLoop, sweeping


class Killed(BaseException):
    """Raised inside a simulated process at the point where it was killed; nothing in it may handle this."""


@dataclass(eq=False)
class Process:
    """A simulated process: what its callbacks are tagged with. ``clock``: its machine's time of day, if it has one."""

    name: str
    role: str | None = None
    clock: Callable[[], float] | None = None
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


class ProcessLoop(VirtualLoop):
    """A virtual loop whose processes can be stopped and killed. They share its one thread, and have no pools."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(**bounds)
        self.has_frozen = False
        self._dead: list[Process] = []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Call it at the next turn; refused for a pool of one's own, whose threads would belong to no process."""
        assert executor is None, "a simulated process has no threads"
        return super().run_in_executor(executor, func, *args)

    def freeze(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.is_stopped = True
        self.has_frozen = True

    def thaw(self, process: Process) -> None:
        """Let a stopped process go on, as SIGCONT does."""
        process.is_stopped = False
        self._release(process)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does."""
        process.is_dead = True
        self.has_frozen = True
        self._dead.append(process)

    def sweep(self) -> None:
        """Let killed processes run again, when nothing that they do matters any more, and tidy everything up."""
        self.has_frozen = False
        for process in self._dead:
            self._release(process)
        super().sweep()

    def _release(self, process: Process) -> None:
        self._ready.extend(process.held)  # type: ignore[attr-defined]
        process.held.clear()

    def _is_held_back(self, handle: asyncio.Handle) -> bool:
        if not self.has_frozen:
            return False
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None or not process.is_frozen:
            return False
        process.held.append(handle)
        return True

    def _call_into(self, future: "asyncio.Future[Any]", func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            super()._call_into(future, func, args)
        except Killed:
            return


def process_loop(**bounds: Any) -> AbstractContextManager[ProcessLoop]:
    """A loop for one simulation; what is left in it at the end is cancelled and closed."""
    return sweeping(ProcessLoop(**bounds))
