"""Tasks that run next to a role without being part of it. If one fails, the role goes on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from streamrl.bus.waiting import end_tasks

log = structlog.get_logger()

GRACE_S = 10.0
"""Seconds to read a topic's end and finish a file. The supervisor waits longer before it kills a process."""

BackgroundTask = Callable[[asyncio.Event], Awaitable[None]]
"""A task that runs until the event is set."""


@asynccontextmanager
async def background(tasks: Sequence[BackgroundTask]) -> AsyncIterator[None]:
    """Run the tasks during the block; after it, they have ``GRACE_S`` to end."""
    over = asyncio.Event()
    running = [asyncio.create_task(_contained(task, over)) for task in tasks]
    try:
        yield
    finally:
        over.set()
        if running:
            _, late = await asyncio.wait(running, timeout=GRACE_S)
            await end_tasks(late)


async def _contained(task: BackgroundTask, over: asyncio.Event) -> None:
    try:
        await task(over)
    except Exception:
        log.exception("a background task failed; the work of this process goes on")
