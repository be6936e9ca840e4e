import os
import signal
import subprocess
import sys
import time

import pytest

from streamrl.deploy.wiring.process import EXIT_CODE, Watchdog
from tests.fakes.clock import FakeClock

pytestmark = pytest.mark.processes

STUCK_LOOP = "time.sleep(30)"
STUCK_ROLE = "watchdog.tick('orders'); await asyncio.sleep(30)"
LIVELY = "print('up', flush=True)\n    for _ in range(30): watchdog.tick('orders'); await asyncio.sleep(0.1)"


def start(work: str, limit_s: float) -> "subprocess.Popen[str]":
    code = f"""
import asyncio, time
from streamrl.deploy.wiring.process import Watchdog
async def main():
    watchdog = Watchdog({limit_s})
    watching = asyncio.create_task(watchdog.watch())
    await asyncio.sleep(0.05)
    {work}
    watching.cancel()
asyncio.run(main())
"""
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_stuck_process_ends() -> None:
    """Its event loop does not turn any more: faulthandler ends it, with all stacks."""
    process = start(STUCK_LOOP, 0.5)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "time.sleep" in stderr or 'File "<string>", line 8 in main' in stderr


def test_a_role_that_makes_no_progress_ends_though_the_event_loop_turns() -> None:
    process = start(STUCK_ROLE, 0.5)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == EXIT_CODE
    assert "no progress" in stdout
    assert "thread" in stderr
    assert "in main" in stderr


def test_a_process_that_was_stopped_for_a_while_goes_on() -> None:
    process = start(LIVELY, 2.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_only_those_are_late_who_are_late_themselves() -> None:
    """The whole process stood still: nobody is to blame, until somebody goes on being silent."""
    clock, ended = FakeClock(), []
    watchdog = Watchdog(8.0, end=lambda: ended.append(clock.now), clock=clock)
    watchdog.tick("orders")
    clock.advance(100.0)
    watchdog.check(late_s=99.0)
    clock.advance(6.0)
    watchdog.check(late_s=0.0)
    assert not ended
    clock.advance(2.0)
    watchdog.check(late_s=0.0)
    assert ended
