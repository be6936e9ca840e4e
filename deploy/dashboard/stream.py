"""Sends a live state to browsers as server-sent events: only sections that changed, once a second.

However many browsers look, the state is put into words once for all of them, and not at all while nobody looks.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from deploy.live.snapshot import SECTIONS
from deploy.live.state import LiveState

TICK_S = 1.0
SLOW = {"curves": 2, "timeline": 2, "lengths": 2, "staleness": 2, "split": 2}
"""Sections that are looked at every so many ticks."""


@dataclass
class Stream:
    """``clock``: seconds since the epoch."""

    state: LiveState
    clock: Callable[[], float] = time.time
    _words: dict[str, str] = field(default_factory=dict)
    _revisions: dict[str, int] = field(default_factory=dict)
    _tick: int = 0
    _refreshed_at: float = -1.0

    async def updates(self, stop: asyncio.Event) -> AsyncIterator[str]:
        """Events for one browser: everything at first, then what changed, until stopped."""
        sent: dict[str, int] = {}
        while not stop.is_set():
            self._refresh()
            due = [name for name, revision in self._revisions.items() if sent.get(name) != revision]
            sent |= {name: self._revisions[name] for name in due}
            parts = [f'"now":{self.clock():.3f}', *(f'"{name}":{self._words[name]}' for name in due)]
            yield "data: {" + ",".join(parts) + "}\n\n"
            await asyncio.sleep(TICK_S)

    def _refresh(self) -> None:
        """Put into words what may have changed; at most once a tick, whoever asks."""
        now = self.clock()
        if 0 <= now - self._refreshed_at < TICK_S * 0.8:
            return
        self._refreshed_at = now
        self.state.tick(now)
        for name, section in SECTIONS.items():
            if name in self._words and self._tick % SLOW.get(name, 1):
                continue
            words = json.dumps(section(self.state, now), separators=(",", ":"), allow_nan=False)
            if words != self._words.get(name):
                self._words[name] = words
                self._revisions[name] = self._revisions.get(name, 0) + 1
        self._tick += 1
