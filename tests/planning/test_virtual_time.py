"""The virtual loop and the agenda of events: time jumps, order is kept, and whoever can never go on is told."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from streamrl.planning.virtual_time import START, Events, Stuck, VirtualLoop, sweeping


def test_hours_pass_at_once_and_timers_come_in_their_order() -> None:
    seen = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time() - START))

    async def main() -> None:
        await asyncio.gather(sleeper("b", 1800), sleeper("a", 60), sleeper("c", 1800))

    with sweeping(VirtualLoop()) as loop:
        loop.run_until_complete(main())
    assert seen == [("a", 60), ("b", 1800), ("c", 1800)]


def test_a_deadlock_a_spin_and_endless_time_are_noticed() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    async def spinning() -> None:
        while True:
            await asyncio.sleep(0)

    async def waiting() -> None:
        while True:
            await asyncio.sleep(10)

    for work, problem in ((forever, "deadlock"), (spinning, "spinning"), (waiting, "not finished")):
        with sweeping(VirtualLoop(max_seconds=1000)) as loop, pytest.raises(Stuck, match=problem):
            loop.run_until_complete(work())


def test_events_come_in_order_of_their_moments_and_what_cannot_end_is_noticed() -> None:
    events = Events()
    seen: list[str] = []
    for name, when in (("late", 5.0), ("first", 2.0), ("second", 2.0)):
        events.at(when, partial(seen.append, name))
    events.run(lambda: len(seen) == 2)
    assert (seen, events.now, events.done, events.next_at) == (["first", "second"], 2.0, 2, 5.0)
    with pytest.raises(Stuck, match="deadlock"):
        events.run(lambda: False)

    def again() -> None:
        events.at(events.now + 1, again)

    again()
    with pytest.raises(Stuck, match="not finished"):
        events.run(lambda: False, most=100)


def test_calls_meant_for_threads_are_made_in_the_loop() -> None:
    async def main(pool: ThreadPoolExecutor) -> list[threading.Thread]:
        loop = asyncio.get_running_loop()
        return [
            await asyncio.to_thread(threading.current_thread),
            await loop.run_in_executor(pool, threading.current_thread),
        ]

    with ThreadPoolExecutor(1) as pool, sweeping(VirtualLoop()) as loop:
        assert loop.run_until_complete(main(pool)) == [threading.current_thread()] * 2


def test_a_call_from_another_thread_is_refused() -> None:
    with sweeping(VirtualLoop()) as loop, ThreadPoolExecutor(1) as pool:
        refused = pool.submit(loop.call_soon_threadsafe, print)
        assert "no threads" in str(refused.exception())
