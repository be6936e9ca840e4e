"""What bounds a test by its progress."""

import asyncio
import subprocess
import sys
import time

import pytest

from tests.progress import ProcessorTime, Progress, bounded_by_progress

Failed = pytest.fail.Exception


def test_what_stands_still_is_failed_where_it_waits() -> None:
    with pytest.raises(Failed, match=r"expected progress, got .* of processor time in"):  # noqa: SIM117
        with bounded_by_progress(still_s=0.5, still_cpu_s=0.4, look_s=0.05):
            asyncio.run(asyncio.sleep(60))


def test_what_computes_in_a_process_of_its_own_is_waited_for_however_slow() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            with bounded_by_progress(still_s=1.0, still_cpu_s=0.02, look_s=0.05):
                time.sleep(3.0)
        finally:
            busy.kill()


def test_what_never_ends_is_failed_by_its_processor_time() -> None:
    with pytest.raises(Failed, match="expected an end within 1 s of processor time"):  # noqa: SIM117
        with bounded_by_progress(most_cpu_s=1.0, look_s=0.05):
            while True:
                pass


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
