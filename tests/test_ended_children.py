import signal
import subprocess
import sys

import pytest

from tests.ended_children import Ended, crashing

pytestmark = pytest.mark.processes

DIES = "import os, signal; os.kill(os.getpid(), signal.{0})"
WAITS = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    found = Ended()
    monkeypatch.setattr("tests.ended_children.ended", found)
    return found


def test_an_unexpected_crash_is_reported_with_its_signal(ended: Ended) -> None:
    subprocess.run([sys.executable, "-c", DIES.format("SIGSEGV")], stderr=subprocess.DEVNULL)
    (line,) = ended.died
    assert "died of SIGSEGV, which nobody sent it" in line


def test_a_signal_that_was_sent_and_a_crash_that_is_expected_are_not(ended: Ended) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS, "-m", "streamrl"], stdout=subprocess.PIPE) as process:
        process.kill()
    with crashing(signal.SIGSEGV):
        subprocess.run([sys.executable, "-c", DIES.format("SIGSEGV")], stderr=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-c", DIES.format("SIGKILL")])
    assert ended.died == []


def test_a_command_of_streamrl_that_dies_by_any_signal_is_reported(ended: Ended) -> None:
    subprocess.run([sys.executable, "-c", DIES.format("SIGKILL"), "-m", "streamrl"])
    (line,) = ended.died
    assert "SIGKILL" in line
