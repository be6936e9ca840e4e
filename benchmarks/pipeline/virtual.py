"""One case in virtual time: the real roles in one process, without the latencies of processes and broker.

Nothing but decoding and training takes time: what a mode or a strategy reaches is what its logic allows.
"""

import asyncio
import tempfile
from pathlib import Path

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.running.recording import Recording, read_recording
from benchmarks.pipeline.running.settings import configuration
from planning.simulation import SimulatedPipeline

TIME_SCALE = 20.0
"""Emulated seconds in a virtual one: heartbeats and the like come at the pace at which they do in a real run."""


def run_virtually(case: Case, prompts: Path, *, steps: int, seed: int) -> Recording:
    """One run of so many optimizer steps; times are virtual seconds, ``TIME_SCALE`` emulated ones each."""
    with tempfile.TemporaryDirectory(prefix="streamrl-virtual-") as scratch:
        settings = configuration(
            case,
            run="virtual",
            directory=Path(scratch),
            prompts=prompts,
            address="nowhere:1",
            time_scale=TIME_SCALE,
            steps=steps,
            seed=seed,
        )
        run = SimulatedPipeline(settings).run()
    return asyncio.run(read_recording(run.history, run.name))
