import asyncio
import time

import pytest

from streamrl.consumers.training.emulation import RUN_AHEAD_S, EmulatedCompute, EmulatedDevice


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_consecutive_work_takes_the_sum_of_its_durations() -> None:
    clock = Clock()
    device = EmulatedDevice(10.0, clock)
    for _ in range(100):
        device.launch(2.0)
        clock.now += max(0.0, device.wall_s_to_wait()) + 0.003  # the caller comes back late, each time
    device.finish(0.0)
    assert clock.now + device.wall_s_to_wait() == pytest.approx(5.0 + 100 * 0.2)


def test_an_idle_device_begins_when_it_is_asked() -> None:
    clock = Clock()
    device = EmulatedDevice(10.0, clock)
    device.finish(1.0)
    clock.now = 9.0
    device.finish(1.0)
    assert device.wall_s_to_wait() == pytest.approx(0.1)


def test_launched_work_may_go_on_for_a_little_after_the_call() -> None:
    clock = Clock()
    device = EmulatedDevice(1.0, clock)
    device.launch(RUN_AHEAD_S / 2)
    assert device.wall_s_to_wait() <= 0
    device.launch(1.0)
    assert device.wall_s_to_wait() == pytest.approx(1.0 - RUN_AHEAD_S / 2)


async def test_a_call_returns_its_result_when_the_device_is_done() -> None:
    device = EmulatedDevice(100.0)
    compute = EmulatedCompute(device)
    began = time.monotonic()

    def act(number: int) -> int:
        device.finish(5.0)
        return number

    results = await asyncio.gather(compute(act, 1), compute(act, 2))
    assert [*results] == [1, 2]
    assert time.monotonic() - began >= 0.1
    with pytest.raises(ZeroDivisionError):
        await compute(lambda: 1 // 0)
    compute.close()
