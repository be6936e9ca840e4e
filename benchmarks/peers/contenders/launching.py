"""Starts a contender's command on its cores, and ends it with all it started when its time is over. Knows none."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
GRACE_S = 40.0


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
    began, cpu_before = time.time(), _cpu_seconds()
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
        try:
            exit_code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end(child)
    return Launched(began, _cpu_seconds() - cpu_before, exit_code)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ask nicely, then end the whole process group."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
