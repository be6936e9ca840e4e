"""Runs a case: in virtual time in this process, or as `streamrl run` with processes and a broker, by the clock."""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.conditions import RESULTS, conditions, rounded, write_results
from benchmarks.pipeline.cases import Case, configuration
from benchmarks.pipeline.recording import Recording, Span, read_recording, read_spans
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.planning.simulation import SimulatedPipeline, SimulatedRun
from streamrl.schemas.errors import StreamRLError
from streamrl.settings.loading import as_toml
from streamrl.settings.tree import Settings

Job = TypeVar("Job")
Figures = dict[str, float]
Row = dict[str, Any]
LONGEST_S = 900.0
PASS_STEPS = 32
"""Steps in one pass over the prompts: more than any case takes, so that no prompt comes twice."""


def simulated(
    case: Case, seed: int, pass_steps: int = PASS_STEPS, changed: Callable[[Settings], Settings] = lambda plain: plain
) -> SimulatedRun:
    """The real dispatcher, workers, trainer and coordinator in one process, without the latencies of processes and
    broker: what a mode or a strategy reaches is what its logic allows. The times of the workload are as in a real run.

    ``changed``: what else the case's settings say.
    """
    with tempfile.TemporaryDirectory(prefix="streamrl-virtual-") as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        case.workload.write_prompts(prompts, pass_steps * case.workload.groups_per_step, seed)
        settings = configuration(
            case, run="virtual", directory=Path(scratch), prompts=prompts, address="nowhere:1", seed=seed
        )
        return SimulatedPipeline(changed(settings), worker_speeds=case.workload.speeds).run()


def run_virtually(case: Case, seed: int) -> Recording:
    """What a simulated run's topics say."""
    run = simulated(case, seed)
    return asyncio.run(read_recording(run.history, run.name))


def simulate_each(
    arguments: Sequence[str] | None,
    name: str,
    description: str | None,
    jobs_of: Callable[[int], Sequence[Job]],
    trial: Callable[[Job], Figures],
    rows_of: Callable[[Sequence[tuple[Job, Figures]]], Iterable[Row]],
) -> list[Row]:
    """The command of a benchmark in virtual time: simulate each job of so many seeds, show the rows and keep them."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compute at once")
    parser.add_argument("--results", type=Path, default=RESULTS / f"{name}.json")
    options, began = parser.parse_args(arguments), time.monotonic()
    jobs = jobs_of(options.seeds)
    # Processes: a simulation is pure Python on one core.
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(zip(jobs, pool.map(trial, jobs), strict=True))
    rows = [rounded(row) for row in rows_of(found)]
    for row in rows:
        print(row, flush=True)
    said = conditions(began, list(range(options.seeds)), ("numpy",), f"make bench-{name}")
    write_results(options.results, {"conditions": said, "rows": rows})
    return rows


@dataclass(frozen=True)
class Run:
    """A case that ran: what its topics say, what its trainer did when, and how long it all took, in seconds."""

    case: Case
    recording: Recording
    spans: list[Span]
    seconds: float


@dataclass(frozen=True)
class Stage:
    """A broker and a folder for any number of runs."""

    folder: Path
    address: str
    seed: int

    def play(self, case: Case) -> Run:
        """Run a case to its end; nothing but its topics is left.

        Raises:
            StreamRLError: it failed.
        """
        assert not case.workload.slow_workers, "processes of one machine are alike"
        prompts, file = self.folder / f"{case.name}.jsonl", self.folder / f"{case.name}.toml"
        case.workload.write_prompts(prompts, PASS_STEPS * case.workload.groups_per_step, self.seed)
        settings = configuration(
            case, run=case.name, directory=self.folder, prompts=prompts, address=self.address, seed=self.seed
        )
        file.write_text(as_toml(settings))
        seconds = _run_pipeline(file, self.folder / f"{case.name}.log")
        history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=self.address)), client_id="benchmark")
        recording = asyncio.run(read_recording(history, case.name))
        spans = read_spans(settings.run.path / "metrics.jsonl")
        shutil.rmtree(settings.run.path)
        return Run(case, recording, spans, seconds)


@contextmanager
def stage(folder: Path, seed: int) -> Iterator[Stage]:
    """A broker as long as the block lasts."""
    with start_cluster(folder / "kafka") as cluster:
        yield Stage(folder, cluster.bootstrap_servers, seed)


def _run_pipeline(configuration: Path, log: Path) -> float:
    """Run it to its end; seconds it took.

    Raises:
        StreamRLError: it failed, or took too long; the text ends with its last line.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "streamrl.cli.app", "run", str(configuration)]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            code = child.wait(LONGEST_S)
        except subprocess.TimeoutExpired as error:
            raise StreamRLError(f"expected {configuration} to end within {LONGEST_S:.0f} s, it still ran") from error
        finally:
            # Also when interrupted: a run that nobody waits for would go on.
            if child.poll() is None:
                child.terminate()
                child.wait(60)
    if code != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise StreamRLError(f"expected a run of {configuration} that ends well, got code {code}: {last}")
    return time.monotonic() - began
