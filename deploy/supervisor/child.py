"""One supervised process: its command, its log file, and how it is ended. Dies with its parent."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.supervisor.parent import die_with_parent

TAIL_BYTES = 16 << 10
_ERROR = re.compile(r"^error: |^[\w.]*(Error|Exception|Superseded|Refused)\b|level=(error|critical)")


@dataclass(frozen=True)
class ChildSpec:
    """What to start: a name unique in the run, the command, extra environment, and where output goes.

    ``essential``: the run is over when it ends well. ``optional``: the run goes on if it cannot be kept alive.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    essential: bool = False
    optional: bool = False


@dataclass
class Child:
    """A running process of a spec."""

    spec: ChildSpec
    process: asyncio.subprocess.Process
    started_at: float

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Start it in a session of its own, so that Ctrl-C reaches the supervisor alone."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.environment},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return cls(spec, process, time.monotonic())

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def ran_for_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_at

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    async def wait_or_kill(self, deadline: float) -> int:
        """Wait for the end until a monotonic deadline, then SIGKILL; the exit code."""
        try:
            return await asyncio.wait_for(self.process.wait(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._signal(signal.SIGKILL)
            return await self.process.wait()

    def last_line(self) -> str:
        """The last line it printed that tells of an error, else the last one; for when it is given up on."""
        try:
            with self.spec.log_path.open("rb") as log:
                log.seek(max(0, self.spec.log_path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        told = [line for line in lines if _ERROR.search(line)]
        return (told or lines or [""])[-1]

    def _signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
