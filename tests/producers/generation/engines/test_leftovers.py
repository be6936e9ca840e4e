"""A test that leaves a process or a thread of an engine behind fails itself, and the next one begins without it."""

import subprocess
import sys
import threading

import pytest

from tests.producers.generation.engines.conftest import engine_processes, engine_threads, nothing_left

pytestmark = pytest.mark.processes

ORPHAN = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)']).pid)"


def test_an_orphaned_engine_process_fails_its_test_and_is_ended() -> None:
    before = engine_processes()
    with pytest.raises(AssertionError, match="closes its engine"), nothing_left(gone_s=0.1):
        subprocess.run([sys.executable, "-c", ORPHAN], check=True, stdout=subprocess.DEVNULL)
        assert len(engine_processes() - before) == 1
    assert engine_processes() <= before


def test_a_thread_that_is_left_fails_its_test() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="vllm-engine", daemon=True)
    try:
        with pytest.raises(AssertionError, match="closes its engine"), nothing_left(gone_s=0.1):
            thread.start()
    finally:
        done.set()
        thread.join()
    assert not engine_threads()


def test_a_process_that_ends_in_time_is_no_leftover() -> None:
    with nothing_left(), subprocess.Popen([sys.executable, "-c", "pass"]):
        pass
