"""Calls that a coroutine makes in a thread.

Invariant a_cancelled_call_waits_for_its_thread: a cancellation reaches the caller only after the call has returned. So
no thread uses a file, a connection or a lock that the caller closes on its way out. ``asyncio.to_thread`` gives no such
promise: it raises at once, and its thread goes on.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from streamrl.bus.waiting import until_ended

T = TypeVar("T")


def _nothing() -> None:
    pass


async def in_thread(
    call: Callable[..., T],
    *arguments: object,
    executor: Executor | None = None,
    on_cancel: Callable[[], object] = _nothing,
) -> T:
    """The result of ``call(*arguments)``, made in a thread of ``executor`` (default: the event loop's).

    When the caller is cancelled or times out, a call that has not started yet is dropped; one that has started is
    waited for, and its result is lost. ``on_cancel`` runs in the event loop at each cancellation, and may ask the call
    to return early.

    Raises:
        Exception: what the call raises.
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
        await until_ended([made], on_cancel=drop)
    except asyncio.CancelledError as cancelled:
        # Asking for the error marks it as retrieved; it becomes the cause of the cancellation.
        raise cancelled from (None if made.cancelled() else made.exception())
    return made.result()  # type: ignore[return-value]  # None only of a dropped call, whose caller was cancelled
