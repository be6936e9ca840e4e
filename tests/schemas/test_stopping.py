"""Signals to processes of their own: what they say, how they end, and when."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ended_children import crashing

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

BEGIN = "import asyncio, os, signal, sys, time\nfrom streamrl.schemas import stopping\nstopping.handle_signals()\n"
SEND = "os.kill(os.getpid(), signal.{0})\n"


def ended(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BEGIN + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


CAUGHT = """
try:
    {0}
    time.sleep(30)
except KeyboardInterrupt:
    stopping.report_stopped()
    sys.exit(stopping.exit_code())
"""


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("SIGTERM", 143, "stopped by SIGTERM\n"), ("SIGHUP", 129, "stopped by SIGHUP\n"), ("SIGINT", 130, "stopped\n")],
)
def test_a_signal_interrupts_as_ctrl_c_does_and_has_an_exit_code_of_its_own(name: str, code: int, said: str) -> None:
    begin = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever starts the tests may ignore it
    done = ended(begin + CAUGHT.format(SEND.format(name)))
    assert (done.returncode, done.stderr) == (code, said)


def test_within_asyncio_the_task_is_cancelled_and_cleans_up() -> None:
    code = """
async def work():
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.01)
        print("cleaned up")
try:
    asyncio.run(work())
except KeyboardInterrupt:
    sys.exit(stopping.exit_code())
"""
    done = ended("signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned up\n", "")


WAITING = """
async def work():
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for at in {moments}:
        loop.call_later(at, os.kill, os.getpid(), signal.SIGTERM)
    with stopping.stop_requests_handled_by(lambda number: (print("asked by", number.name, flush=True), stop.set())):
        await stop.wait()
        await asyncio.sleep(0.9)
    print("through", flush=True)
import {loop}
{loop}.run(work())
sys.exit(stopping.exit_code())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_command_that_was_started_with_sigint_ignored_is_interrupted_all_the_same(loop: str, name: str) -> None:
    code = f"""
import {loop}
async def work():
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.{name})
    await asyncio.sleep(30)
try:
    {loop}.run(work())
except KeyboardInterrupt:
    sys.exit(stopping.exit_code())
"""
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = subprocess.run(
        [sys.executable, "-c", ignored + BEGIN + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (128 + signal.Signals[name], "")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_first_signal_requests_a_stop_and_the_second_ends_at_once(loop: str) -> None:
    once, twice = (ended(WAITING.format(moments=moments, loop=loop)) for moments in ([0.05], [0.05, 0.7]))
    assert (once.returncode, once.stdout) == (143, "asked by SIGTERM\nthrough\n"), once.stderr
    assert (twice.returncode, twice.stdout) == (143, "asked by SIGTERM\n"), twice.stderr


def test_simultaneous_signals_count_once() -> None:
    done = ended(WAITING.format(moments=[0.05, 0.06, 0.1], loop="asyncio"))
    assert (done.returncode, done.stdout) == (143, "asked by SIGTERM\nthrough\n"), done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_held_block_ends_before_an_interrupt_is_raised(name: str) -> None:
    code = f"""
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with stopping.held():
        {SEND.format(name).strip()}
        time.sleep(0.05)
        print("whole")
    print("never")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert ended(code).stdout == "whole\ninterrupted\n"


def test_a_stop_signal_swallowed_by_clean_up_is_delivered_again() -> None:
    code = f"""
class Swallows:
    def __del__(self):
        {SEND.format("SIGTERM").strip()}
        time.sleep(0.01)
Swallows()
async def work():
    stop = asyncio.Event()
    with stopping.stop_requests_handled_by(lambda number: stop.set()):
        await stop.wait()
    print("told")
asyncio.run(work())
"""
    assert ended(code).stdout == "told\n"


def test_a_terminal_that_is_closed_under_nohup_ends_nothing() -> None:
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + BEGIN + SEND.format("SIGHUP") + "print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_an_interrupt_that_left_a_text_is_no_end_by_sigint(tmp_path: Path) -> None:
    """As `python -m` runs it: Python remembers the interrupt of a text that it executed."""
    code = BEGIN + (
        "try:\n    exec('os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)')\n"
        "except KeyboardInterrupt:\n    pass\nfinally:\n    stopping.is_over()\nsys.exit(stopping.exit_code())\n"
    )
    (tmp_path / "interrupted.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-m", "interrupted"], env=environment, check=False)
    assert done.returncode == 128 + signal.SIGTERM


SENT_AS_SOON_AS_HANDLED = """
import os, signal
set_handler = signal.signal
def set_and_send(number, handler):
    before = set_handler(number, handler)
    if number == signal.SIGTERM:
        os.kill(os.getpid(), number)
    return before
signal.signal = set_and_send
from streamrl.__main__ import main
main()
"""


def test_a_command_whose_signal_comes_with_the_handler_itself_ends_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SENT_AS_SOON_AS_HANDLED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")


SWALLOWED = """
import weakref
class Thing:
    pass
def on_end(_):
    {0}
    time.sleep(0.001)
thing = Thing()
reference = weakref.ref(thing, on_end)
try:
    del thing
    time.sleep(30)
except KeyboardInterrupt:
    stopping.report_stopped()
    sys.exit(stopping.exit_code())
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_an_interrupt_swallowed_by_a_callback_is_raised_again(name: str, code: int) -> None:
    begin = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = ended(begin + SWALLOWED.format(SEND.format(name).strip()))
    assert (done.returncode, done.stderr) == (code, "stopped by SIGTERM\n" if name == "SIGTERM" else "stopped\n")


def test_an_interrupt_that_comes_again_while_the_last_is_still_seen_to_is_not_lost() -> None:
    slow = """
signal.signal(signal.SIGINT, signal.default_int_handler)
import threading
start = threading.Thread.start
def started_late(thread):
    start(thread)
    time.sleep(0.2)
threading.Thread.start = started_late
"""
    done = ended(slow + SWALLOWED.format(SEND.format("SIGINT").strip()))
    assert (done.returncode, done.stderr) == (130, "stopped\n")


IMPORTED = """
stopping.IMPORTING_S = {0}
try:
    import slow
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted", "slow" in sys.modules)
    sys.exit(stopping.exit_code())
"""


def test_a_module_that_is_being_imported_is_not_interrupted(tmp_path: Path) -> None:
    """One whose import never ends is, after a time, so that its process ends."""
    (tmp_path / "slow.py").write_text(f"import os, signal, time\n{SEND.format('SIGTERM')}time.sleep(0.3)\n")
    begin = f"signal.signal(signal.SIGINT, signal.default_int_handler)\nsys.path.insert(0, {str(tmp_path)!r})\n"
    whole, endless = ended(begin + IMPORTED.format(60.0)), ended(begin + IMPORTED.format(0.1))
    assert (whole.returncode, whole.stdout) == (143, "interrupted True\n"), whole.stderr
    assert (endless.returncode, endless.stdout) == (143, "interrupted False\n"), endless.stderr


def test_a_crash_leaves_the_stacks_of_all_threads() -> None:
    code = """
import threading
def beside():
    time.sleep(30)
threading.Thread(target=beside, daemon=True).start()
def within():
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(30)
within()
"""
    with crashing(signal.SIGSEGV):
        done = ended(code)
    assert done.returncode == -signal.SIGSEGV
    for part in ("Fatal Python error: Segmentation fault", "in beside", "in within"):
        assert part in done.stderr
