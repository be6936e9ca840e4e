"""Waiting in place of sleeping, so that what is waited for is seen at once."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, or so long; whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def until_ended(tasks: "Iterable[asyncio.Future[Any]]", on_cancel: Callable[[], object] = lambda: None) -> None:
    """Wait until all tasks have ended, however they do; the tasks themselves are left alone.

    ``on_cancel`` is called when the caller is cancelled meanwhile, and may make them end sooner.

    Raises:
        CancelledError: the caller was cancelled, and all of them have ended.
    """
    cancelled: asyncio.CancelledError | None = None
    tasks = [*tasks]
    while running := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            cancelled = None  # or the error and this frame would keep each other alive


async def to_its_end(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that must run to its end: a cancellation of the caller is raised after the call has ended.

    Raises:
        Exception: what the call raises.
        CancelledError: the caller was cancelled; an error of the call is lost.
    """
    task = asyncio.create_task(call)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await until_ended([task])
    return task.result()
