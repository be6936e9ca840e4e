"""What is worth a line: the newest events, with repeats counted instead of repeated."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 120
REPEAT_WITHIN_S = 5.0


class Event(NamedTuple):
    """``level``: info, good, warn or bad. ``times``: how often it came since ``at``."""

    number: int
    at: float
    level: str
    text: str
    times: int = 1


@dataclass
class EventLog:
    """Newest last."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT))
    numbered: int = 0

    def add(self, at: float, level: str, text: str, times: int = 1) -> None:
        """Note an event; the same one a moment ago is counted up."""
        for index in range(-1, -min(4, len(self.events)) - 1, -1):
            event = self.events[index]
            if event.text == text and event.level == level and at - event.at < REPEAT_WITHIN_S:
                self.events[index] = event._replace(times=event.times + times)
                return
        self.numbered += 1
        self.events.append(Event(self.numbered, at, level, text, times))
