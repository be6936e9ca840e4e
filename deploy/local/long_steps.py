"""Tells a user what `streamrl run` does if that takes long, and how far it is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 5.0
"""Seconds between two lines about the same work."""


def print_at_once(line: str) -> None:
    """Print a line that is seen at once, also through a pipe."""
    print(line, flush=True)


@contextmanager
def told_if_long(
    what: str,
    stage: Callable[[], str] = lambda: "",
    every_s: float = EVERY_S,
    tell: Callable[[str], None] = print_at_once,
) -> Iterator[None]:
    """Within the block, print every few seconds the step under way, how long it has taken, and its present stage.

    ``stage``: called from another thread; empty: not known.
    """
    ended, started_at = threading.Event(), time.monotonic()

    def keep_telling() -> None:
        while not ended.wait(every_s):
            now = stage()
            tell(f"{what}, {time.monotonic() - started_at:.0f} s so far{f': {now}' if now else ''}")

    teller = threading.Thread(target=keep_telling, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
