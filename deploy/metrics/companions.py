"""What runs beside a role without being part of it. Nothing that happens to a companion ends the role."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

log = structlog.get_logger()

END_S = 10.0
Companion = Callable[[asyncio.Event], Awaitable[None]]
"""Runs until stopped."""


@asynccontextmanager
async def beside(companions: Sequence[Companion]) -> AsyncIterator[None]:
    """Run the companions while the block runs; then they have ten seconds to end."""
    over = asyncio.Event()
    tasks = [asyncio.create_task(_unharmed(companion, over)) for companion in companions]
    try:
        yield
    finally:
        over.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=END_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def _unharmed(companion: Companion, over: asyncio.Event) -> None:
    try:
        await companion(over)
    except Exception:
        log.exception("something beside the work of this process failed; the work goes on")


async def stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until stopped."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
