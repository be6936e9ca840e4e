"""Processes that die with their starter, and those that do not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.bus.embedded.process import ProcessId, TiedProcess, start_detached, stop_all
from tests.progress import calm_s

pytestmark = pytest.mark.processes

SLEEP = ["/bin/sh", "-c", "sleep 60"]
STARTER = """
import sys
from pathlib import Path
from streamrl.bus.embedded.process import TiedProcess
tied = TiedProcess(["/bin/sleep", "60"], Path("."), Path(sys.argv[1]))
print(tied.id.pid, tied.id.started, flush=True)
sys.stdin.read()
"""


def wait_for_output(folder: Path, expected: str) -> None:
    deadline = calm_s() + 5
    output = folder / "output"
    while not output.exists() or output.read_text() != expected:
        assert calm_s() < deadline
        time.sleep(0.01)


def test_a_tied_process_is_killed_when_its_starter_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "output")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    pid, started = starter.stdout.readline().decode().split()
    tied = ProcessId(int(pid), started)
    assert tied.alive()
    starter.kill()
    starter.communicate()
    assert tied.wait_ended(5)


def test_closing_a_tied_process_kills_it(tmp_path: Path) -> None:
    tied = TiedProcess(SLEEP, tmp_path, tmp_path / "output")
    assert tied.id.alive()
    tied.close()
    assert not tied.id.alive()


def test_a_detached_process_outlives_the_shell_that_started_it_and_stops_when_told(tmp_path: Path) -> None:
    detached = start_detached(["/bin/sh", "-c", "echo here; exec sleep 60"], tmp_path, tmp_path / "output")
    wait_for_output(tmp_path, "here\n")
    assert detached.alive()
    stop_all([detached], 5)
    assert not detached.alive()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = TiedProcess(["/bin/sh", "-c", "trap '' TERM; echo ready; sleep 60"], tmp_path, tmp_path / "output")
    wait_for_output(tmp_path, "ready\n")
    stop_all([deaf.id], 0.2)
    assert not deaf.id.alive()
    deaf.close()


def test_a_reused_pid_is_not_signalled() -> None:
    stranger = ProcessId(os.getpid(), "a start time that is not ours")
    assert not stranger.alive()
    stranger.send(signal.SIGKILL)
    stop_all([stranger], 1)
