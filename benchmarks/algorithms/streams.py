"""A run under way, instances attached to it, each command a process, and what its workers say that they generated."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import message_of
from streamrl.schemas.errors import StreamRLError
from streamrl.schemas.identifiers import INSTANCES
from streamrl.schemas.reports import Heartbeat
from streamrl.schemas.topics import HEARTBEATS
from streamrl.settings.loading import as_toml
from streamrl.settings.tree import Settings

CLI = [sys.executable, "-m", "streamrl.cli.app"]
UNFILTERED = "algorithm.dynamic_sampling=false"
"""All groups are trained, those too whose rewards are alike: emulated ones always are."""
NEVER = 1_000_000
TAIL_BYTES = 1 << 16
"""Many times a step's metrics: what is looked at five times a second is not read from its beginning."""
PATIENCE_S = 120.0
"""With one thing that a run or an instance does within seconds, on a machine that is busy too."""
END_S = 60.0


@dataclass
class Stream:
    """A run under way in ``directory``, and the instances that are attached to it, by name."""

    process: "subprocess.Popen[bytes]"
    directory: Path
    attached: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def attach(self, name: str, algorithm: str, begin: str, changes: Sequence[str] = (UNFILTERED,)) -> None:
        """Start ``streamrl attach``; returns before it is. ``changes``: settings as ``section.key=value``."""
        options = ["--run", str(self.directory), "--algorithm", algorithm, "--from", begin]
        given = [argument for change in changes for argument in ("--set", change)]
        self.attached[name] = _started([*CLI, "attach", name, *options, *given], self._log(name))

    def leave(self, names: Sequence[str]) -> None:
        """Let them end, with a checkpoint, as Ctrl-C does, and wait until they have.

        Raises:
            StreamRLError: one ended otherwise.
        """
        for name in names:
            self.attached[name].send_signal(signal.SIGINT)
        for name in names:
            _wait(self.attached.pop(name), self._log(name), END_S, code=128 + signal.SIGINT)

    def ended(self, name: str, patience_s: float) -> None:
        """Wait until an instance has ended by itself.

        Raises:
            StreamRLError: it failed, or goes on.
        """
        _wait(self.attached.pop(name), self._log(name), patience_s)

    def finished(self, patience_s: float) -> None:
        """Wait until the run itself has ended; raises what ``ended`` does."""
        _wait(self.process, self.directory.with_suffix(".log"), patience_s)

    def until(self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for it.

        Raises:
            StreamRLError: it does not come about in time, or a process ended meanwhile.
        """
        give_up_at = time.monotonic() + patience_s
        while not condition():
            self.check()
            if time.monotonic() > give_up_at:
                raise StreamRLError(f"expected {what} within {patience_s:.0f} s, it did not come")
            time.sleep(0.2)

    def check(self) -> None:
        """See that run and instances go on.

        Raises:
            StreamRLError: one of them ended.
        """
        logs = {self._log(name): process for name, process in self.attached.items()}
        for log, process in {self.directory.with_suffix(".log"): self.process, **logs}.items():
            if process.poll() is not None:
                raise StreamRLError(f"expected {log.stem} to go on, got code {process.returncode}: {_last_line(log)}")

    def newest(self, instance: str = "") -> list[dict[str, Any]]:
        """The newest rows of the metrics of an instance, or of the run's own trainer: one a step, two at most."""
        where = self.directory / INSTANCES / instance if instance else self.directory
        path = where / "metrics.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
        return [json.loads(line) for line in lines[-3:-1] if line.startswith(b"{")]

    def step(self, instance: str = "") -> int:
        """The newest of its optimizer steps; 0 before the first."""
        rows = self.newest(instance)
        return int(rows[-1]["step"]) if rows else 0

    def _log(self, name: str) -> Path:
        return self.directory.parent / f"{self.directory.name}-{name}.log"


@contextmanager
def running(folder: Path, name: str, settings: Settings) -> Iterator[Stream]:
    """A run of these settings, in ``folder/name``; run and instances are ended with the block."""
    config = folder / f"{name}.toml"
    config.write_text(as_toml(settings))
    started = Stream(_started([*CLI, "run", str(config)], folder / f"{name}.log"), folder / name)
    try:
        yield started
    finally:
        left = [*started.attached.values(), started.process]
        for process in left:
            process.terminate()  # as Ctrl-C: each ends with a checkpoint
        for process in left:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _started(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _wait(process: "subprocess.Popen[bytes]", log: Path, patience_s: float, code: int = 0) -> None:
    try:
        ended = process.wait(patience_s)
    except subprocess.TimeoutExpired as error:
        raise StreamRLError(f"expected {log.stem} to end within {patience_s:.0f} s, it goes on") from error
    if ended != code:
        raise StreamRLError(f"expected {log.stem} to end with code {code}, got {ended}: {_last_line(log)}")


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]


Counts = Mapping[str, Sequence[tuple[float, int]]]
"""By process of a worker: (when, in seconds since the epoch; tokens generated so far)."""


def read_counts(address: str, run: str) -> dict[str, list[tuple[float, int]]]:
    """What the heartbeats of the run's workers say."""

    async def read() -> dict[str, list[tuple[float, int]]]:
        history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=address)), client_id="benchmark")
        counts: dict[str, list[tuple[float, int]]] = defaultdict(list)
        async for record in history.records(HEARTBEATS.full_name(run)):
            if isinstance(beat := message_of(record), Heartbeat):
                counts[f"{beat.worker_id}/{beat.incarnation}"].append((beat.sent_at, beat.generated_tokens))
        return counts

    return asyncio.run(read())


def tokens_per_s(counts: Counts, began: float, ended: float) -> float:
    """Of all workers between two moments; between two heartbeats a worker's tokens come evenly."""
    generated = 0.0
    for beats in counts.values():
        at, tokens = zip(*sorted(beats), strict=True)
        first, last = np.interp([began, ended], at, tokens)
        generated += float(last - first)
    return generated / (ended - began)


def generated(counts: Counts) -> int:
    """Tokens of all workers, what was not delivered included."""
    return sum(max(tokens for _, tokens in beats) for beats in counts.values())
