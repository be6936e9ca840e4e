"""Tasks that run beside a role without being part of it: whatever happens to them, the role goes on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from streamrl.bus.waiting import end_tasks

log = structlog.get_logger()

GRACE_S = 10.0
"""For a last look at a topic and a file's end; the supervisor gives a process longer than that before it kills it."""

BackgroundTask = Callable[[asyncio.Event], Awaitable[None]]
"""Runs until the event is set."""


@asynccontextmanager
async def background(tasks: Sequence[BackgroundTask]) -> AsyncIterator[None]:
    """Run the tasks while the block runs; then they have ten seconds to end."""
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
