"""Starts a contender's command on its cores, and ends it with all it started when its time is over. Knows none."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.observability.usage import cpu_s_by_process

REPOSITORY = Path(__file__).parents[3]
GRACE_S = 40.0
COUNT_EVERY_S = 0.5
"""Seconds between two looks at the processor time; what a process spends after the last one is not counted."""


@dataclass(frozen=True)
class Launched:
    """When the command was started (seconds since the epoch), the processor time it and all its children took, and its
    exit code; none: stopped.
    """

    began: float
    cpu_seconds: float
    exit_code: int | None


def launch(
    command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int], limit_s: float, log: Path
) -> Launched:
    """Run a command to its end, or for ``limit_s`` seconds; its output goes to ``log``."""
    began = time.time()
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        spent: dict[int, float] = {}
        try:
            exit_code = _watch(child, began + limit_s, spent)
        finally:
            _end(child)
    return Launched(began, sum(spent.values()), exit_code)


def _watch(child: "subprocess.Popen[bytes]", deadline: float, spent: dict[int, float]) -> int | None:
    """Wait for the end; returns the exit code, None at the deadline. ``spent``: seconds by process, as last seen.

    Counted while the processes run: the kernel adds those of a child only if its parent waits for it.
    """
    while (code := child.poll()) is None and time.time() < deadline:
        spent |= cpu_s_by_process(child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(COUNT_EVERY_S, max(0.0, deadline - time.time())))
    return code


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ask nicely, then end the whole process group."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
