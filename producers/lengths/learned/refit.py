"""Fits in a thread of its own, one fit at a time; the caller goes on and takes the result when it is there.

It does not know what is fitted. A fit that fails leaves what was there; it is counted and the next one is tried.
"""

import threading
from collections.abc import Callable

import structlog

log = structlog.get_logger()


class Refitter:
    """``failures`` counts fits that raised."""

    def __init__(self) -> None:
        self.failures = 0
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a fit is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, fit: Callable[[], None]) -> None:
        """Begin a fit; only while none is under way. The thread ends by itself, within seconds."""
        assert not self.is_busy, "one fit at a time"
        self._thread = threading.Thread(target=self._run, args=(fit,), name="length-refit")
        self._thread.start()

    def _run(self, fit: Callable[[], None]) -> None:
        try:
            fit()
        except Exception as error:
            self.failures += 1
            log.warning("length model not fitted", error=repr(error), failures=self.failures)

    def wait(self) -> None:
        """Until no fit is under way."""
        if self._thread is not None:
            self._thread.join()
