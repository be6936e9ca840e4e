"""Simulated processes are killed and stopped as signals do it, and have no threads."""

import asyncio
from contextvars import copy_context

import pytest

from streamrl.planning.virtual_time import START
from tests.simulation.processes import PROCESS, Process, ProcessLoop, process_loop


def spawn(loop: ProcessLoop, process: Process, work: object) -> "asyncio.Task[None]":
    context = copy_context()
    context.run(PROCESS.set, process)
    return loop.create_task(work, context=context)  # type: ignore[arg-type]


def test_a_thread_is_refused_and_a_call_meant_for_one_runs_in_the_loop() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 7)

    with process_loop() as loop:
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

    with process_loop() as loop:
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
