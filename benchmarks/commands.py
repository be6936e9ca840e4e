"""Commands as a user would have them, in processes of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.observability.usage import cpu_s_by_process

ROOT = Path(__file__).parents[1]
STREAMRL = (sys.executable, "-m", "streamrl.cli.app")
GRACE_S = 40.0
COUNT_EVERY_S = 0.5
"""Seconds between two looks at the processor time; what a process spends after the last one is not counted."""


def output_of(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> str:
    """What a command writes, run from the repository's root; ``environment``: beside this process's own.

    Raises:
        RuntimeError: it failed; the text ends with its last words.
        subprocess.TimeoutExpired: it took longer than that.
    """
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if ended.returncode:
        said = ended.stdout[-2000:] + ended.stderr[-2000:]
        raise RuntimeError(f"{' '.join(command)} failed with exit code {ended.returncode}: {said}")
    return ended.stdout


def audited(directory: Path, servers: str) -> dict[str, Any]:
    """What ``streamrl audit`` says of the run in a directory, whose topics these servers hold.

    Raises:
        RuntimeError: the books do not balance, or it failed.
    """
    command = [*STREAMRL, "audit", "--run", str(directory.resolve()), "--json"]
    found: dict[str, Any] = json.loads(output_of(command, {"STREAMRL_KAFKA__BOOTSTRAP_SERVERS": servers}))
    return found


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
            cwd=ROOT,
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
