"""Child processes that either die with this process or outlive it. Knows nothing of Java or Kafka.

Invariant: a signal never reaches another process with a reused pid, because pid and start time identify a process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, because no library must be loaded between fork and exec


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, number)


# Both scripts get OUTPUT COMMAND... The new process has its own session, so the terminal's Ctrl-C does not reach it.
_DETACHED = 'out=$1; shift; "$@" >>"$out" 2>&1 </dev/null & echo $!'
# The shell is the child's parent and blocks on a pipe that only this process holds open. When this process ends for any
# reason, the shell kills the child. The child's pid cannot be reused, because it stays taken until the shell is gone.
_TIED = f"{_DETACHED}; exec >/dev/null; cat >/dev/null; kill -KILL $! 2>/dev/null; wait"
_POLL_S = 0.02


@dataclass(frozen=True)
class ProcessId:
    """Identifies one process of this machine. The start time distinguishes it from a later one with the same pid."""

    pid: int
    started: str

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie, which only waits to be reaped, does not."""
        return _started(self.pid) == self.started

    def send(self, signal_number: int) -> None:
        """Sends the signal if the process still runs."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the process's end; returns whether it ended within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def stop_all(processes: Sequence[ProcessId], timeout_s: float) -> None:
    """SIGTERM to all processes at once, SIGKILL to those left after ``timeout_s``; returns when all are gone."""
    for process in processes:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    for process in processes:
        if not process.wait_ended(max(0.0, deadline - time.monotonic())):
            process.send(signal.SIGKILL)
            process.wait_ended(timeout_s)


def start_detached(command: Sequence[str], folder: Path, output: Path, inherited: Sequence[int] = ()) -> ProcessId:
    """Starts ``command`` in ``folder`` so that it outlives this process; its output is appended to ``output``.

    The file descriptors ``inherited`` stay open in the new process.
    """
    printed = subprocess.run(
        ["/bin/sh", "-c", _DETACHED, "sh", str(output), *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=inherited,
        start_new_session=True,
        check=True,
    ).stdout
    return _identify(int(printed))


class TiedProcess:
    """A process that is killed when this object is closed or collected, or when this process ends in any way.

    A child that is forked without exec (multiprocessing's ``fork``) inherits the tie, and delays the kill until it
    ends.
    """

    def __init__(self, command: Sequence[str], folder: Path, output: Path, inherited: Sequence[int] = ()) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _TIED, "sh", str(output), *command],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=inherited,
            start_new_session=True,
        )
        assert self._shell.stdout is not None
        self.id = _identify(int(self._shell.stdout.readline()))

    def close(self) -> None:
        """Kills the process if it still runs, and reaps its shell."""
        self._shell.communicate()


def _identify(pid: int) -> ProcessId:
    return ProcessId(pid, _started(pid) or "ended at once")


def _started(pid: int) -> str | None:
    """The start time as the system gives it; None for a process that is gone or a zombie."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    listed = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = listed.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()
