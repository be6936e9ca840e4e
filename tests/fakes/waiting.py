"""Waits for something to become true, instead of for a time."""

import asyncio
from collections.abc import Callable

from tests.progress import patience


async def until(condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Return once the condition holds; fail the test if it does not come to hold."""
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
