"""Where the time of one step went: seconds by name, and when each stretch began and ended. Knows no trainer."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

GAP_S = 1e-3
"""Stretches of one name that are nearer than that are one."""


class Span(NamedTuple):
    """What was done from ``start`` to ``end``, in seconds on the trainer's clock (since the epoch)."""

    name: str
    start: float
    end: float


@dataclass
class Stopwatch:
    """``clock`` tells the time of day; durations are measured on a clock that nobody sets."""

    clock: Callable[[], float] = time.time
    began: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's duration. Blocks follow each other; they are not nested."""
        start, at = time.perf_counter(), self.clock()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
            self._add(Span(name, at, at + taken))

    def _add(self, span: Span) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last.name == span.name and span.start - last.end < GAP_S:
            self.spans[-1] = last._replace(end=span.end)
        else:
            self.spans.append(span)

    def since_start(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.perf_counter() - self.began
