import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.inspection.process import AUTOGROUP, DISPLAY_NICENESS, NICENESS, tune_garbage_collector
from tests.progress import calm_s

pytestmark = pytest.mark.processes

BEGIN = (
    "import os, signal, time; from streamrl.inspection.process import lower_priority; lower_priority(); "
    "print(os.getpid(), flush=True); "
)
TEN_MINUTES = "[time.sleep(0.01) for _ in range(60000)]"  # a signal just before one long sleep would wait for its end
in_autogroups = pytest.mark.skipif(not os.access(AUTOGROUP, os.W_OK), reason="this kernel has no autogroups")


def started(then: str) -> tuple["subprocess.Popen[str]", int]:
    """The command, and the process that does its work."""
    command = subprocess.Popen([sys.executable, "-c", BEGIN + then], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    return command, int(command.stdout.readline())


def finished(command: "subprocess.Popen[str]") -> int:
    with command:
        return command.wait(10)


def test_the_process_runs_at_the_lowest_priority() -> None:
    command, worker = started(TEN_MINUTES)
    assert psutil.Process(worker).nice() == NICENESS
    command.terminate()
    assert finished(command) == -signal.SIGTERM


DISPLAY = """
import asyncio, os, threading, time
from streamrl.inspection.process import DISPLAY_NICENESS, enter_own_session, give_way_when, normal_priority
enter_own_session()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
nice = lambda: {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
told, shown = [nice()], []
async def display():
    yielding = asyncio.create_task(give_way_when(lambda: bool(shown)))
    await asyncio.sleep(0.15)
    told.append(nice())
    shown.append("the first sight")
    await yielding
    told.append(nice())
    with normal_priority():
        told.append(nice())
    told.append(nice())
asyncio.run(display())
print(told, flush=True)
os._exit(0)
"""


def test_a_display_gives_way_when_it_has_shown_something_and_not_while_it_answers() -> None:
    before = {os.getpriority(os.PRIO_PROCESS, 0)}
    low = {max(DISPLAY_NICENESS, *before)}
    raised = before if os.geteuid() == 0 else low
    said = subprocess.run([sys.executable, "-c", DISPLAY], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == f"{[before, before, low, raised, low]}\n"


@in_autogroups
def test_its_session_as_a_whole_has_a_small_share_and_others_keep_theirs() -> None:
    ours = AUTOGROUP.read_text()
    command, worker = started(TEN_MINUTES)
    assert Path(f"/proc/{worker}/autogroup").read_text().split()[1:] == ["nice", str(NICENESS)]
    assert ours == AUTOGROUP.read_text() == Path(f"/proc/{command.pid}/autogroup").read_text()
    command.terminate()
    finished(command)


@pytest.mark.parametrize("disposition", ["SIG_DFL", "SIG_IGN"])
def test_the_command_ends_with_the_code_of_its_work(disposition: str) -> None:
    code = f"import signal; signal.signal(signal.SIGCHLD, signal.{disposition}); {BEGIN} os._exit(4)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=10).returncode == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH])
def test_signals_reach_the_work(number: signal.Signals) -> None:
    handled = f"signal.signal({number.value}, lambda *_: os._exit(7)); print('ready', flush=True); {TEN_MINUTES}"
    command, _ = started(handled)
    assert command.stdout is not None
    assert command.stdout.readline() == "ready\n"
    command.send_signal(number)
    assert finished(command) == 7


def test_the_worker_is_suspended_with_its_command() -> None:
    command, worker = started(TEN_MINUTES)
    command.send_signal(signal.SIGTSTP)
    wait_for(worker, psutil.STATUS_STOPPED)
    wait_for(command.pid, psutil.STATUS_STOPPED)
    command.send_signal(signal.SIGCONT)
    wait_for(worker, psutil.STATUS_SLEEPING)
    command.terminate()
    assert finished(command) == -signal.SIGTERM


def wait_for(process: int, status: str) -> None:
    deadline = calm_s() + 10
    while psutil.Process(process).status() != status:
        assert calm_s() < deadline
        time.sleep(0.01)


def test_work_does_not_outlive_a_command_that_was_killed() -> None:
    command, worker = started(TEN_MINUTES)
    command.kill()
    finished(command)
    deadline = calm_s() + 10
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert calm_s() < deadline
        time.sleep(0.01)


@pytest.fixture
def collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_the_collector_leaves_start_up_objects_alone_and_finds_later_cycles(collector_as_before: None) -> None:
    kept = Knot()
    tune_garbage_collector()
    assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    later = Knot()
    later_id = id(later)
    assert any(id(each) == later_id for each in gc.get_objects())
    del later
    assert gc.collect() > 0
    assert kept.me is kept
