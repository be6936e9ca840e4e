"""A process's clock that a test sets, forward and back, while the process runs: an offset in a file that both map.

Processes under test import this before all else, by a ``sitecustomize`` on their path; ``time.time`` is then wrong for
whoever asks it, ours and libraries. ``time.monotonic`` is never set, here as on any machine.
"""

import mmap
import os
import struct
import time
from pathlib import Path

VARIABLE = "STREAMRL_TEST_CLOCK"
_SECONDS = struct.Struct("<d")


class WrongClock:
    """The offset of one process, in seconds."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SECONDS.size))
        with path.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), _SECONDS.size)

    @property
    def seconds(self) -> float:
        """By how much the clock is ahead."""
        return float(_SECONDS.unpack_from(self._offset)[0])

    def set(self, seconds: float) -> None:
        """Step the clock."""
        _SECONDS.pack_into(self._offset, 0, seconds)


def install() -> None:
    """Put this process on the clock that its environment names; that of a reward is clean, and names none."""
    if (path := os.environ.get(VARIABLE)) is None:
        return
    clock, real, real_ns = WrongClock(Path(path)), time.time, time.time_ns
    time.time = lambda: real() + clock.seconds
    time.time_ns = lambda: real_ns() + int(1e9 * clock.seconds)
