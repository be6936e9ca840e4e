"""Runs rounds through two child processes and turns their times into rates and latencies."""

import asyncio
import json
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.transport.child import READY
from benchmarks.transport.round import Contender, Round

ROUND_TIMEOUT_S = 180
LINE_LIMIT = 64 << 20
NAMES = {
    Contender("kafka", "batched"): "Kafka, typed frames, our batches",
    Contender("kafka", "single"): "Kafka, typed frames, each acknowledged",
    Contender("redis", "single"): "Redis stream, one pickled record an entry",
    Contender("redis", "group"): "Redis stream, a pickled group an entry (PipelineRL)",
    Contender("redis", "batched"): "Redis stream, our batches",
    Contender("files", "single"): "JSON lines, each flushed (PipelineRL)",
    Contender("files", "batched"): "JSON lines, our batches",
}


@dataclass(frozen=True)
class Pair:
    """The producing and the consuming process."""

    producer: Process
    consumer: Process


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    """Both processes, ended afterwards."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.transport.child", role, stdin=PIPE, stdout=PIPE, limit=LINE_LIMIT
        )
        for role in ("produce", "consume")
    ]
    try:
        yield Pair(*processes)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@dataclass(frozen=True)
class Outcome:
    """Seconds from the first publish to the last array in the consumer, and per trajectory from end to micro-batch."""

    seconds: float
    latencies: list[float]


async def play(processes: Pair, asked: Round) -> Outcome:
    """One round, both sides connected before it begins."""
    for process in (processes.producer, processes.consumer):
        await _tell(process, json.dumps(asdict(asked)))
        assert await _answer(process) == READY
    for process in (processes.consumer, processes.producer):
        await _tell(process, "go")
    sent = await _answer(processes.producer)
    received = await _answer(processes.consumer)
    return Outcome(
        seconds=max(received["entered"]) - sent["began"],
        latencies=[entered - ended for ended, entered in zip(sent["at"], received["entered"], strict=True)],
    )


async def _tell(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()


async def _answer(process: Process) -> Any:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), ROUND_TIMEOUT_S)
    if not line:
        raise RuntimeError(f"a benchmark process ended with code {await process.wait()}; see its output above")
    return json.loads(line)


@dataclass
class Result:
    """One contender at one size: a figure per repetition; the medians are what is reported."""

    contender: Contender
    tokens: int
    is_busy: bool = False
    rates: list[float] = field(default_factory=list)
    p50s: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)

    def add(self, throughput: Outcome, paced: Outcome) -> None:
        """Take in one repetition."""
        self.rates.append(len(throughput.latencies) / throughput.seconds)
        cuts = statistics.quantiles(paced.latencies, n=100, method="inclusive")
        self.p50s.append(1000 * cuts[49])
        self.p99s.append(1000 * cuts[98])

    def newest(self) -> str:
        """The last repetition as a line."""
        busy = " (busy)" if self.is_busy else ""
        return (
            f"{' '.join(self.contender):>14} {self.tokens:>6} tokens{busy}: {self.rates[-1]:>8.0f} trajectories/s, "
            f"p50 {self.p50s[-1]:.1f} ms, p99 {self.p99s[-1]:.1f} ms"
        )

    def row(self, ours: "Result | None") -> dict[str, Any]:
        """The row of ``transport.json``; ``ratio``: our rate over this one, within the same repetition."""
        ratios = [one / other for one, other in zip(ours.rates if ours else (), self.rates, strict=False)]
        return {
            "path": self.contender.path,
            "batching": self.contender.batching,
            "name": NAMES[self.contender],
            "tokens": self.tokens,
            "busy": self.is_busy,
            "ratio": round(statistics.median(ratios), 2) if ratios else None,
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)] if ratios else [None, None],
            "trajectories_per_s": round(statistics.median(self.rates), 1),
            "p50_ms": round(statistics.median(self.p50s), 2),
            "p99_ms": round(statistics.median(self.p99s), 2),
            "trajectories_per_s_range": [round(min(self.rates), 1), round(max(self.rates), 1)],
            "p50_ms_range": [round(min(self.p50s), 2), round(max(self.p50s), 2)],
            "repetitions": len(self.rates),
            "p99_ms_range": [round(min(self.p99s), 2), round(max(self.p99s), 2)],
        }
