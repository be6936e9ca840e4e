"""Waits that return as soon as an event or task is done, and calls made in a thread.

Invariant a_cancelled_call_waits_for_its_thread: a cancellation reaches the caller only after the call has returned. So
no thread uses a file, a connection or a lock that the caller closes while it exits. ``asyncio.to_thread`` does not
promise this: it raises at once, and its thread continues.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def _do_nothing() -> None:
    pass


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, at most ``seconds``; returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def wait_for_tasks(tasks: "Iterable[asyncio.Future[Any]]", on_cancel: Callable[[], object] = _do_nothing) -> None:
    """Wait until all tasks have ended, with or without an error. The tasks are not cancelled.

    ``on_cancel`` is called if the caller is cancelled during the wait, and may make the tasks end sooner.

    Raises:
        CancelledError: the caller was cancelled, and all tasks have ended.
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
            cancelled = None  # otherwise the error and this frame would keep each other alive


async def to_its_end(call: Coroutine[Any, Any, T], patience_s: float | None = None) -> T:
    """The result of a call that must run to its end. A cancellation of the caller is raised after the call has ended.

    ``patience_s``: seconds after the caller's cancellation at which the call is cancelled too; None: never.

    Raises:
        Exception: the call's own error.
        CancelledError: the caller was cancelled; an error of the call is lost.
    """
    task, loop = asyncio.create_task(call), asyncio.get_running_loop()
    task.add_done_callback(_drop)
    cancel_later: Callable[[], object] = _do_nothing
    if patience_s is not None:
        cancel_later = partial(loop.call_later, patience_s, task.cancel)
    await wait_for_tasks([task], on_cancel=cancel_later)
    return task.result()


async def end_tasks(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks and wait until all have ended; their results and errors are dropped.

    Raises:
        CancelledError: the caller was cancelled, and all tasks have ended.
    """
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
        task.add_done_callback(_drop)
    await wait_for_tasks(tasks)


def _drop(task: "asyncio.Task[Any]") -> None:
    """Retrieve a task's exception. Otherwise asyncio would log that it was never retrieved."""
    if not task.cancelled():
        task.exception()


async def in_thread(
    call: Callable[..., T],
    *arguments: object,
    executor: Executor | None = None,
    on_cancel: Callable[[], object] = _do_nothing,
) -> T:
    """The result of ``call(*arguments)``, made in a thread of ``executor`` (default: the event loop's).

    If the caller is cancelled or times out, a call that has not started is dropped. A call that has started is waited
    for, and its result is lost. ``on_cancel`` runs in the event loop at each cancellation, and may ask the call to
    return early.

    Raises:
        Exception: the call's own error.
        CancelledError: the caller was cancelled, and no thread makes the call any more.
    """
    is_dropped = False
    context = copy_context()

    def run() -> T | None:
        return None if is_dropped else context.run(partial(call, *arguments))

    made = asyncio.get_running_loop().run_in_executor(executor, run)

    def drop() -> None:
        nonlocal is_dropped
        is_dropped = True
        on_cancel()

    try:
        await wait_for_tasks([made], on_cancel=drop)
    except asyncio.CancelledError as cancelled:
        # Asking for the error marks it as retrieved. It becomes the cause of the cancellation.
        raise cancelled from (None if made.cancelled() else made.exception())
    return made.result()  # type: ignore[return-value]  # None only for a dropped call, whose caller was cancelled
