"""Waiting in place of sleeping, so that what is waited for is seen at once."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def _nothing() -> None:
    pass


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, or so long; whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def until_ended(tasks: "Iterable[asyncio.Future[Any]]", on_cancel: Callable[[], object] = _nothing) -> None:
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


async def to_its_end(call: Coroutine[Any, Any, T], patience_s: float | None = None) -> T:
    """The result of a call that must run to its end: a cancellation of the caller is raised after the call has ended.

    ``patience_s``: the call is cancelled, too, so long after the caller was; None: never.

    Raises:
        Exception: what the call raises.
        CancelledError: the caller was cancelled; an error of the call is lost.
    """
    task, loop = asyncio.create_task(call), asyncio.get_running_loop()
    task.add_done_callback(_drop)
    hurry: Callable[[], object] = _nothing if patience_s is None else partial(loop.call_later, patience_s, task.cancel)
    await until_ended([task], on_cancel=hurry)
    return task.result()


async def end_tasks(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks and wait until all have ended; their results and errors are dropped.

    Raises:
        CancelledError: the caller was cancelled, and all of them have ended.
    """
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
        task.add_done_callback(_drop)
    await until_ended(tasks)


def _drop(task: "asyncio.Task[Any]") -> None:
    """Retrieve its exception, or asyncio would log that it was never retrieved."""
    if not task.cancelled():
        task.exception()
