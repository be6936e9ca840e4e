"""Ends a process that makes no progress, so that its supervisor starts it anew. Knows nothing of what it does.

Invariant a_stuck_process_ends: when the event loop does not turn, or a loop that told of itself does not turn any
more, for longer than the limit, all stacks go to standard error and the process exits.
"""

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import structlog

log = structlog.get_logger()

EXIT_CODE = 70


def _exit() -> NoReturn:
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_CODE)


@dataclass
class Watchdog:
    """``alive`` is called, by name, at every turn of a loop; waiting is a turn as well, as long as it is bounded.

    The event loop itself is watched from a thread of faulthandler's, which needs no interpreter lock.
    """

    limit_s: float
    end: Callable[[], None] = _exit
    clock: Callable[[], float] = time.monotonic
    _turned_at: dict[str, float] = field(default_factory=dict)

    def alive(self, name: str) -> None:
        """A loop turned."""
        self._turned_at[name] = self.clock()

    async def watch(self) -> None:
        """Watch until cancelled."""
        interval, looked_at = self.limit_s / 8, self.clock()
        try:
            while True:
                faulthandler.dump_traceback_later(self.limit_s, exit=True)
                await asyncio.sleep(interval)
                self.look(self.clock() - looked_at - interval)
                looked_at = self.clock()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def look(self, late_s: float) -> None:
        """Whoever is late only because the whole process stood still is forgiven."""
        for name, turned_at in self._turned_at.items():
            silent_s = self.clock() - turned_at
            self._turned_at[name] += max(0.0, late_s)
            if silent_s - max(0.0, late_s) > self.limit_s:
                log.critical("no progress, ending this process", loop=name, silent_for_s=round(silent_s, 1))
                self.end()
