"""Runs cases one after the other on one broker, and gives their recordings."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.running.recording import Recording, read_recording
from benchmarks.pipeline.running.session import run_pipeline
from benchmarks.pipeline.running.settings import configuration
from benchmarks.pipeline.running.spans import Span, read_spans
from benchmarks.pipeline.workload.prompts import write_prompts
from bus.embedded.cluster import start_cluster
from bus.history import BusHistory
from bus.kafka.bus import KafkaBus
from bus.kafka.settings import KafkaSettings
from settings.loading import as_toml

PASS_STEPS = 8
"""Steps in one pass over the prompts."""


@dataclass(frozen=True)
class Run:
    """A case that ran: what its topics say, what its trainer did when, and how long it all took, in seconds.

    ``time_scale``: emulated seconds in one of the wall clock.
    """

    case: Case
    recording: Recording
    spans: list[Span]
    seconds: float
    time_scale: float


@dataclass(frozen=True)
class Stage:
    """A broker and a folder for any number of runs."""

    folder: Path
    address: str
    time_scale: float
    seed: int

    def play(self, case: Case) -> Run:
        """Run a case to its end; nothing but its topics is left.

        Raises:
            StreamRLError: it failed.
        """
        work, steps = case.workload, case.warm_up + case.steps
        prompts, file = self.folder / f"{case.name}.jsonl", self.folder / f"{case.name}.toml"
        time_scale = self.time_scale / case.slowed
        write_prompts(prompts, work, PASS_STEPS * work.groups_per_step, self.seed)
        settings = configuration(
            case,
            run=case.name,
            directory=self.folder,
            prompts=prompts,
            address=self.address,
            time_scale=time_scale,
            steps=steps,
            seed=self.seed,
        )
        file.write_text(as_toml(settings))
        seconds = run_pipeline(file, self.folder / f"{case.name}.log")
        history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=self.address)), client_id="benchmark")
        recording = asyncio.run(read_recording(history, case.name))
        spans = read_spans(settings.run.path / "metrics.jsonl")
        shutil.rmtree(settings.run.path)
        return Run(case, recording, spans, seconds, time_scale)


@contextmanager
def stage(folder: Path, time_scale: float, seed: int) -> Iterator[Stage]:
    """A stage with a broker of its own."""
    with start_cluster(folder / "kafka") as cluster:
        yield Stage(folder, cluster.bootstrap_servers, time_scale, seed)
