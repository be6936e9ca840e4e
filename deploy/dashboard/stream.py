"""Sends a live state to browsers as server-sent events: only sections that changed, at the pace that is given.

However many browsers look, the state is put into words once for all of them, and not at all while nobody looks.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from deploy.live.pace import OFTEN_S
from deploy.live.snapshot import SECTIONS
from deploy.live.state import LiveState

SLOW = {"curves": 2, "timeline": 2, "lengths": 2, "staleness": 2, "split": 2}
"""Sections that are looked at every so many ticks."""


@dataclass
class Stream:
    """``pace_s``: seconds between two updates. ``clock``: seconds since the epoch."""

    state: LiveState
    clock: Callable[[], float] = time.time
    pace_s: Callable[[], float] = lambda: OFTEN_S
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
            pace_s = self.pace_s()
            told = f'"now":{self.clock():.3f},"pace":{pace_s:.3f}'
            parts = [told, *(f'"{name}":{self._words[name]}' for name in due)]
            yield "data: {" + ",".join(parts) + "}\n\n"
            await asyncio.sleep(pace_s)

    def _refresh(self) -> None:
        """Put into words what may have changed; at most once a second, whoever asks."""
        now = self.clock()
        if 0 <= now - self._refreshed_at < OFTEN_S * 0.8:
            return
        self._refreshed_at = now
        moment = self.state.moment(now)
        self.state.tick(moment)
        for name, section in SECTIONS.items():
            if name in self._words and self._tick % SLOW.get(name, 1):
                continue
            words = json.dumps(section(self.state, moment), separators=(",", ":"), allow_nan=False)
            if words != self._words.get(name):
                self._words[name] = words
                self._revisions[name] = self._revisions.get(name, 0) + 1
        self._tick += 1
