"""One round as both processes see it: what is asked, the pace, the micro-batch at the end, and the clock.

Times are of ``time.monotonic``, which all processes of a machine share.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from streamrl.bus.kafka.limits import LIMITS

TOKEN_BUDGET = 32_768
BATCH_BYTES = LIMITS.max_batch_bytes
"""Where our publisher closes a batch, and at equal batching the peers."""
LINGER_S = LIMITS.linger_s
PathName = Literal["kafka", "redis", "files"]
Batching = Literal["single", "group", "batched"]


class Contender(NamedTuple):
    """A path, and what goes over it at once: one trajectory, a group of them, or what has come up within a linger."""

    path: PathName
    batching: Batching


OURS = Contender("kafka", "batched")
DEFAULTS = (OURS, Contender("redis", "single"), Contender("files", "single"))
"""Each side as it comes."""
CONTENDERS = (
    *DEFAULTS,
    Contender("redis", "group"),
    Contender("redis", "batched"),
    Contender("files", "batched"),
    Contender("kafka", "single"),
)


@dataclass(frozen=True)
class Round:
    """``rate`` trajectories per second, or as fast as it goes if None."""

    path: PathName
    batching: Batching
    address: str
    """Where the broker, the server or the folder is."""
    stream: str
    tokens: int
    count: int
    rate: float | None
    seed: int


@dataclass
class Ends:
    """When each trajectory ended in the worker: on schedule, whether or not the worker had time for it then."""

    asked: Round
    began: float = 0.0
    at: list[float] = field(default_factory=list, repr=False)
    before_waiting: Callable[[], None] = lambda: None
    """Called when the next trajectory is still to come: a batch that is held goes out without lingering."""

    def _due(self) -> Iterator[float]:
        self.began = time.monotonic()
        for index in range(self.asked.count):
            due = self.began + index / self.asked.rate if self.asked.rate else time.monotonic()
            self.at.append(due)
            yield due

    def __iter__(self) -> Iterator[int]:
        """Indices, each when its trajectory ends."""
        for index, due in enumerate(self._due()):
            if due > time.monotonic():
                self.before_waiting()
                time.sleep(max(0.0, due - time.monotonic()))
            yield index

    async def __aiter__(self) -> AsyncIterator[int]:
        """The same on an event loop."""
        for index, due in enumerate(self._due()):
            if (early := due - time.monotonic()) > 0:
                await asyncio.sleep(early)
            yield index


@dataclass
class MicroBatches:
    """Decoded trajectories, gathered until the token budget is full; a full one is let go as if trained."""

    entered: dict[int, float] = field(default_factory=dict, repr=False)
    _tokens: int = 0
    _current: list[object] = field(default_factory=list, repr=False)

    def add(self, index: int, arrays: object, tokens: int) -> None:
        """One trajectory enters."""
        if self._tokens + tokens > TOKEN_BUDGET:
            self._current, self._tokens = [], 0
        self._current.append(arrays)
        self._tokens += tokens
        self.entered[index] = time.monotonic()
