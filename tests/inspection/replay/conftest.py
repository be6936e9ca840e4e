"""A recorded run with a crash and a poisoned sample in it, as a run's directory and its export."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from streamrl.bus.history import BusHistory
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.inspection.export import ALL, Exporter
from streamrl.settings.loading import as_toml
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings
from tests.consumers.training.factories import save_tiny_model
from tests.consumers.training.trainer_harness import LOOP, RUN
from tests.inspection.replay.recorded_run import BATCHING, KEPT, Recorded, record, usual_groups

STEPS, BAD_STEP, CULPRIT = 14, 13, "p/25/0/1"


@dataclass
class RecordedRunFiles:
    """``directory`` is the run's own, ``export`` the segments of its topics."""

    recorded: Recorded
    directory: Path
    export: Path


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRunFiles:
    model = save_tiny_model(tmp_path_factory.mktemp("recorded-model"))
    directory = tmp_path_factory.mktemp("runs") / RUN
    groups = usual_groups(STEPS)
    bad = groups[25][1]
    texts = {"prompt_text": "why?", "completion_text": "because"}
    groups[25][1] = bad.replace(logprobs=bad.logprobs - np.float32(9.0), rewards={"exact": 5.0}, **texts)
    algorithm = AlgorithmSettings(ratio="proximal", importance_sampling_cap=1e9, mask_truncated_completions=True)

    async def made() -> RecordedRunFiles:
        training = KEPT.model_copy(update={"max_grad_norm": 1e9})  # or the bad step would be refused
        recorded = await record(directory, model, groups, crash_at=8, algorithm=algorithm, training=training)
        settings = Settings.model_validate(
            {
                "run": {"name": RUN, "directory": str(directory.parent)},
                "model": {"path": str(model)},
                "data": {"path": "prompts.jsonl"},
                "loop": LOOP.model_dump(),
                "batching": BATCHING.model_dump(),
                "algorithm": algorithm.model_dump(),
                "training": recorded.training.model_dump(),
            }
        )
        RunDirectory(directory).config.write_text(as_toml(settings))
        export = tmp_path_factory.mktemp("export")
        history = BusHistory(recorded.harness.bus)
        await Exporter(history, RUN, RunDirectory(directory).config, export).export(ALL, ())
        return RecordedRunFiles(recorded, directory, export)

    return asyncio.run(made())


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("replayed-model"))
