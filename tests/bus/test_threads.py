"""Calls in threads: what a caller may close after a cancellation, and what happens to results and errors."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from streamrl.bus.waiting import in_thread


class SlowCall:
    """Runs until it is released; ``is_running`` tells whether a thread is inside."""

    def __init__(self) -> None:
        self.started, self.released = threading.Event(), threading.Event()
        self.is_running = False

    def __call__(self) -> str:
        self.is_running = True
        self.started.set()
        assert self.released.wait(30)
        self.is_running = False
        return "done"

    async def begun(self, calling: "asyncio.Task[str]") -> None:
        while not self.started.is_set():
            assert not calling.done()
            await asyncio.sleep(0.001)


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    slow = SlowCall()
    calling = asyncio.create_task(in_thread(slow))
    await slow.begun(calling)
    for _ in range(3):  # however often it is cancelled
        calling.cancel()
        await asyncio.sleep(0.01)
        assert slow.is_running
        assert not calling.done()
    slow.released.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert not slow.is_running


async def test_a_timeout_waits_for_the_thread_and_is_a_timeout() -> None:
    slow = SlowCall()
    asyncio.get_running_loop().call_later(0.05, slow.released.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_thread(slow)
    assert not slow.is_running


async def test_on_cancel_is_called_once_and_may_end_the_call() -> None:
    slow, asked = SlowCall(), list[str]()

    def end() -> None:
        asked.append("end")
        slow.released.set()

    calling = asyncio.create_task(in_thread(slow, on_cancel=end))
    await slow.begun(calling)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert asked == ["end"]


async def test_a_call_that_has_not_started_is_dropped() -> None:
    slow, made = SlowCall(), list[int]()
    with ThreadPoolExecutor(1) as executor:
        first = asyncio.create_task(in_thread(slow, executor=executor))
        await slow.begun(first)
        second = asyncio.create_task(in_thread(made.append, 1, executor=executor))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        slow.released.set()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await first == "done"
        assert made == []


async def test_results_errors_and_context_pass() -> None:
    of = ContextVar("of", default="nobody")
    of.set("caller")
    assert await in_thread(of.get) == "caller"
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 1, 0)


async def test_the_error_of_a_cancelled_call_is_the_cause_of_the_cancellation() -> None:
    started, released = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        released.wait(30)
        raise OSError("disk full")

    calling = asyncio.create_task(in_thread(fail, on_cancel=released.set))
    while not started.is_set():
        await asyncio.sleep(0.001)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await calling
    assert str(raised.value.__cause__) == "disk full"
