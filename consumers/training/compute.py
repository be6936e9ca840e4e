"""The one thread in which the trainer computes, so that the event loop goes on polling. Knows nothing of models."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

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
