"""A bounded number of bytes that a publisher may hold. Knows nothing of records.

Invariant: space is granted in the order in which it was asked for, so that records keep their order.
"""

import asyncio
from collections import deque


class BufferSpace:
    """Counts bytes in use; a single piece larger than the limit gets in when nothing else is held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes held now."""
        return self._used

    def take(self, size: int) -> bool:
        """Take space at once, if there is any and nobody waits."""
        if self._waiting or not self._fits(size):
            return False
        self._used += size
        return True

    async def wait(self, size: int, timeout_s: float) -> None:
        """Take space, waiting for it.

        Raises:
            TimeoutError: none became free in time.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, granted)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.release(size)
            else:
                self._waiting.remove(entry)
                self._grant()
            raise

    def release(self, size: int) -> None:
        """Give space back."""
        self._used -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, granted = self._waiting.popleft()
            self._used += size
            granted.set_result(None)
