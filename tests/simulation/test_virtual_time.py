"""The virtual loop: time jumps, order is kept, processes are killed and stopped as signals do it."""

import asyncio
from contextvars import copy_context

import pytest

from tests.simulation.virtual_time import PROCESS, START, Process, Stuck, VirtualLoop, virtual_loop


def spawn(loop: VirtualLoop, process: Process, work: object) -> "asyncio.Task[None]":
    context = copy_context()
    context.run(PROCESS.set, process)
    return loop.create_task(work, context=context)  # type: ignore[arg-type]


def test_hours_pass_at_once_and_timers_come_in_their_order() -> None:
    seen = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time() - START))

    async def main() -> None:
        await asyncio.gather(sleeper("b", 1800), sleeper("a", 60), sleeper("c", 1800))

    with virtual_loop() as loop:
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
        with virtual_loop(max_seconds=1000) as loop, pytest.raises(Stuck, match=problem):
            loop.run_until_complete(work())


def test_a_thread_is_refused_and_a_call_meant_for_one_runs_in_the_loop() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 7)

    with virtual_loop() as loop:
        assert loop.run_until_complete(main()) == 7
        with pytest.raises(AssertionError, match="no threads"):
            loop.run_in_executor(object(), print)


def test_a_killed_process_runs_no_finally_and_a_stopped_one_goes_on_later() -> None:
    seen: list[str] = []

    async def work(name: str) -> None:
        try:
            for _ in range(4):
                await asyncio.sleep(1)
                seen.append(f"{name}{asyncio.get_running_loop().time() - START:.1f}")
        finally:
            seen.append(f"{name} ended")

    with virtual_loop() as loop:
        killed, stopped = Process("k"), Process("s")

        async def main() -> None:
            tasks = [spawn(loop, killed, work("k")), spawn(loop, stopped, work("s"))]
            await asyncio.sleep(1.5)
            loop.kill(killed)
            loop.freeze(stopped)
            await asyncio.sleep(8)
            assert seen == ["k1.0", "s1.0"]
            loop.thaw(stopped)
            await tasks[1]
            assert seen == ["k1.0", "s1.0", "s9.5", "s10.5", "s11.5", "s ended"]

        loop.run_until_complete(main())
    assert seen[-1] == "k ended", "what was killed is tidied up when nothing matters any more"
