"""A device that only takes time, and the place where calls for it are made. Knows no policy.

As on a real device, micro-batches are launched and then waited for: the caller may be a little ahead, so that its own
work, and a late wake-up, leave no gap between two of them. Invariant work_in_a_row_takes_the_sum_of_its_durations.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

# The one thread in which the trainer computes, so that the event loop goes on polling. Knows nothing of models.

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs calls one after the other in its own thread."""

    def __init__(self, threads: int) -> None:
        """``threads``: CPU threads of one torch operation; 0 leaves torch's choice."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._prepare)

    def _prepare(self) -> None:
        # OpenMP keeps this number per calling thread, so it is set here and not in the main thread.
        if self._threads:
            torch.set_num_threads(self._threads)

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result; what it raises is raised here."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Wait for the call in progress, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


RUN_AHEAD_S = 0.02
"""Launched work that need not be done when a call returns; seconds of the wall clock."""


class EmulatedDevice:
    """Works on one thing after the other; ``time_scale`` emulated seconds take one second."""

    def __init__(self, time_scale: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._time_scale = time_scale
        self._monotonic = monotonic
        self._free_at = self._returns_at = monotonic()

    def launch(self, seconds: float) -> None:
        """Work for so many emulated seconds, after what was launched before."""
        self._free_at = max(self._free_at, self._monotonic()) + seconds / self._time_scale
        self._returns_at = max(self._returns_at, self._free_at - RUN_AHEAD_S)

    def finish(self, seconds: float) -> None:
        """The same, and the call that does it returns when everything is done."""
        self.launch(seconds)
        self._returns_at = self._free_at

    def wall_s_to_wait(self) -> float:
        """Seconds of the wall clock until the caller may go on."""
        return self._returns_at - self._monotonic()


class EmulatedCompute:
    """A ``Compute``: makes calls in a thread, for their files' sake, and then waits for the device."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._turn = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, when the device is done with it; what it raises is raised here."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            result = await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))
            if (wait_s := self._device.wall_s_to_wait()) > 0:
                await asyncio.sleep(wait_s)
            return result

    def close(self) -> None:
        """Wait for the call in progress, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
