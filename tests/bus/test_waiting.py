import asyncio
import gc

import pytest

from streamrl.bus.waiting import end_tasks, to_its_end, wait_for_event, wait_for_tasks
from tests.progress import patience


async def test_waiting_ends_with_the_event_or_at_the_time_out() -> None:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    began = loop.time()
    assert not await wait_for_event(event, 0.05)
    assert 0.04 < loop.time() - began < 2
    loop.call_later(0.01, event.set)
    assert await wait_for_event(event, 60)
    assert await wait_for_event(event, 0.0)
    assert loop.time() - began < 10


async def test_a_cancellation_is_none_of_its_time_outs() -> None:
    waiting = asyncio.create_task(wait_for_event(asyncio.Event(), 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_end_is_waited_for_over_cancellations_which_then_pass() -> None:
    hurried, may_end = list[int](), asyncio.Event()
    ending = asyncio.create_task(may_end.wait())
    waiting = asyncio.create_task(wait_for_tasks([ending], on_cancel=lambda: hurried.append(1)))
    await asyncio.sleep(0)
    for _ in range(2):
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ending.result() is True
    assert hurried == [1, 1]


async def test_how_a_task_ended_is_left_to_the_task() -> None:
    async def fail() -> None:
        raise ValueError

    failing = asyncio.create_task(fail())
    await wait_for_tasks([failing])
    assert isinstance(failing.exception(), ValueError)


async def test_a_call_runs_to_its_end_if_its_caller_is_cancelled() -> None:
    may_end, ended = asyncio.Event(), list[str]()

    async def close(name: str) -> str:
        await may_end.wait()
        ended.append(name)
        if name == "bad":
            raise ValueError(name)
        return name

    calls = [asyncio.create_task(to_its_end(close(name))) for name in ("good", "bad", "cancelled")]
    await asyncio.sleep(0)
    calls[2].cancel()
    await asyncio.sleep(0)
    may_end.set()
    good, bad, cancelled = await asyncio.gather(*calls, return_exceptions=True)
    assert ended == ["good", "bad", "cancelled"]
    assert good == "good"
    assert isinstance(bad, ValueError)
    assert isinstance(cancelled, asyncio.CancelledError)


async def test_a_call_that_is_waited_for_only_so_long_is_cancelled_then() -> None:
    began, ended = asyncio.Event(), list[str]()

    async def start() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    caller = asyncio.create_task(to_its_end(start(), 0.05))
    await began.wait()
    for _ in range(2):  # one that is impatient
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not ended
    async with patience(20):
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert ended == ["cancelled"]


async def test_tasks_are_ended_also_over_a_cancellation_and_their_errors_are_dropped() -> None:
    may_end, errors = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: errors.append(context["message"]))

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            raise ValueError("at its end")

    tasks = [asyncio.create_task(work()) for _ in range(2)]
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(tasks))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks), "what a task does at its end is not cancelled"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert all(task.done() for task in tasks)
    del tasks
    gc.collect()
    assert not errors
