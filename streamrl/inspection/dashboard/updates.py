"""The stream of updates that keeps browsers up to date with one run's state.

Invariant the_state_is_rendered_once_for_all_browsers: the state is rendered as JSON once for all browsers, and not at
all without any.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from streamrl.observability.run_state.pace import OFTEN_S
from streamrl.observability.run_state.snapshot import sections_of
from streamrl.observability.run_state.state import RunState

SLOW = dict.fromkeys(("curves", "timeline", "lengths", "staleness", "split", "rewards", "usage"), 2)
"""Ticks between two renderings of a section that is large and changes slowly."""


@dataclass
class UpdateStream:
    """Server-sent events with only the changed sections of the state, at a given pace.

    ``pace_s``: seconds between two updates. ``clock``: seconds since the epoch.
    """

    state: RunState
    clock: Callable[[], float] = time.time
    pace_s: Callable[[], float] = lambda: OFTEN_S
    _rendered: dict[str, str] = field(default_factory=dict)
    _revisions: dict[str, int] = field(default_factory=dict)
    _tick: int = 0
    _refreshed_at: float = -1.0

    async def updates(self, stop: asyncio.Event) -> AsyncGenerator[str, None]:
        """Events for one browser until ``stop``: first all sections, then the changed ones."""
        sent: dict[str, int] = {}
        while not stop.is_set():
            self._refresh()
            # The sections that a browser has are remembered as revisions, not as texts.
            due = [name for name, revision in self._revisions.items() if sent.get(name) != revision]
            sent |= {name: self._revisions[name] for name in due}
            pace_s = self.pace_s()
            head = f'"now":{self.clock():.3f},"pace":{pace_s:.3f}'
            parts = [head, *(f'"{name}":{self._rendered[name]}' for name in due)]
            yield "data: {" + ",".join(parts) + "}\n\n"
            await asyncio.sleep(pace_s)

    def _refresh(self) -> None:
        """Render the sections that may have changed as JSON, at most once a second for all browsers."""
        now = self.clock()
        # A little below the pace, because the timers of several browsers are not aligned.
        # A negative age means that the clock was set back. Then refresh at once.
        if 0 <= now - self._refreshed_at < OFTEN_S * 0.8:
            return
        self._refreshed_at = now
        moment = self.state.known_until(now)
        self.state.tick(moment)
        for name, section in sections_of(self.state).items():
            if name in self._rendered and self._tick % SLOW.get(name, 1):
                continue
            rendered = json.dumps(section(moment), separators=(",", ":"), allow_nan=False)
            if rendered != self._rendered.get(name):
                self._rendered[name] = rendered
                self._revisions[name] = self._revisions.get(name, 0) + 1
        self._tick += 1
