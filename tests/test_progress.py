"""What bounds a test by its progress."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import progress as module
from tests.progress import ProcessorTime, Progress, bounded_by_progress, calm_s, patience, within

Failed = pytest.fail.Exception


def test_a_test_without_progress_fails_where_it_waits() -> None:
    with pytest.raises(Failed, match=r"expected progress, got .* of processor time in"):  # noqa: SIM117
        with bounded_by_progress(still_s=0.5, still_cpu_s=0.4, look_s=0.05):
            asyncio.run(asyncio.sleep(60))


@pytest.mark.processes
def test_work_in_another_process_counts_as_progress() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            with bounded_by_progress(still_s=1.0, still_cpu_s=0.02, look_s=0.05):
                time.sleep(3.0)
        finally:
            busy.kill()


def test_an_endless_loop_fails_by_its_processor_time() -> None:
    with pytest.raises(Failed, match="expected an end within 1 s of processor time"):  # noqa: SIM117
        with bounded_by_progress(most_cpu_s=1.0, look_s=0.05):
            while True:
                pass


@pytest.mark.processes
def test_processor_time_is_kept_of_processes_that_have_ended() -> None:
    time_of = ProcessorTime()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        before = time_of.look()
        while (after := time_of.look()) < before + 0.5:
            time.sleep(0.05)
        busy.kill()
    assert time_of.look() >= after


def test_a_stretch_without_progress_counts_only_once_it_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = [0.0], [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(lambda: used[0], still_s=10.0, still_cpu_s=1.0, most_cpu_s=100.0)
    for seconds, cpu_s, ends in ((9, 5.0, False), (10, 6.5, False), (19, 6.5, False), (20, 6.5, True), (21, 200, True)):
        now[0], used[0] = float(seconds), float(cpu_s)
        assert (progress.why_to_end() is not None) == ends


async def test_a_wait_goes_on_as_long_as_a_processor_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressure, began, loop = tmp_path / "cpu", time.monotonic(), asyncio.get_running_loop()
    monkeypatch.setattr(module, "PRESSURE", pressure)

    def waited(seconds: float) -> None:
        pressure.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(seconds * 1e6)}\nfull total=0\n")

    waited(100.0)
    for after in (0.1, 0.2, 0.3):  # all of the time until then
        loop.call_later(after, lambda: waited(100.0 + time.monotonic() - began))
    with pytest.raises(TimeoutError):
        async with patience(0.15):
            await asyncio.sleep(10)
    assert time.monotonic() - began > 0.4


async def test_an_awaitable_that_times_out_is_cancelled() -> None:
    forever = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await within(forever, 0.01)
    assert forever.cancelled()
    assert await within(asyncio.sleep(0, "there"), 10) == "there"


def test_without_the_kernel_s_word_all_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRESSURE", tmp_path / "none")
    assert time.monotonic() <= calm_s() <= time.monotonic()
