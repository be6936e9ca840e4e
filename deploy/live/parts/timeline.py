"""Who did what and when: a lane of stretches and marks for every process, the newest few hundred of each."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

STRETCHES = 500
MARKS = 200
JOINED_WITHIN_S = 0.05
"""Stretches of one kind that are nearer than that are one."""


class Stretch(NamedTuple):
    """``kind`` was done from ``start`` to ``end`` (epoch seconds); ``tag``: the weights' number, or the step."""

    start: float
    end: float
    kind: str
    tag: int


class Mark(NamedTuple):
    """Something that happened at a moment."""

    at: float
    kind: str
    text: str


@dataclass
class Lane:
    """Stretches follow each other and never overlap."""

    stretches: deque[Stretch] = field(default_factory=lambda: deque(maxlen=STRETCHES))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))

    def extend(self, start: float, end: float, kind: str, tag: int) -> None:
        """Note a stretch; what overlaps the last one begins at its end."""
        last = self.stretches[-1] if self.stretches else None
        if last is not None:
            if start - last.end < JOINED_WITHIN_S and last.kind == kind and last.tag >= tag:
                if end > last.end:
                    self.stretches[-1] = last._replace(end=end)
                return
            start, tag = max(start, last.end), max(tag, last.tag)
        if end > start:
            self.stretches.append(Stretch(start, end, kind, tag))

    def mark(self, at: float, kind: str, text: str) -> None:
        """Note a moment."""
        self.marks.append(Mark(at, kind, text))

    def seconds(self, since: float, until: float) -> dict[str, float]:
        """Seconds of each kind between two moments."""
        found: dict[str, float] = {}
        for stretch in reversed(self.stretches):
            if stretch.end <= since:
                break
            inside = min(stretch.end, until) - max(stretch.start, since)
            if inside > 0:
                found[stretch.kind] = found.get(stretch.kind, 0.0) + inside
        return found
