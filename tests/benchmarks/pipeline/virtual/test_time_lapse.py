import asyncio
import time

import pytest

from benchmarks.pipeline.virtual.time_lapse import START_S, TimeLapse


def test_an_hour_passes_at_once_and_in_order() -> None:
    async def sleep() -> tuple[float, list[str]]:
        woken: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        await asyncio.gather(after(3600.0, "late"), after(60.0, "early"))
        return asyncio.get_running_loop().time(), woken

    began = time.monotonic()
    with asyncio.Runner(loop_factory=TimeLapse) as runner:
        now, woken = runner.run(sleep())
    assert now == pytest.approx(START_S + 3600.0)
    assert woken == ["early", "late"]
    assert time.monotonic() - began < 5.0


def test_calls_for_threads_are_made_at_once() -> None:
    async def call() -> int:
        return await asyncio.to_thread(lambda: 7)

    with asyncio.Runner(loop_factory=TimeLapse) as runner:
        assert runner.run(call()) == 7


def test_a_loop_in_which_nobody_can_go_on_says_so() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="everybody waits"), asyncio.Runner(loop_factory=TimeLapse) as runner:
        runner.run(wait_for_nobody())
