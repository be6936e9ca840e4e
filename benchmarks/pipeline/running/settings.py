"""The settings of one run."""

from pathlib import Path
from typing import Any

from benchmarks.pipeline.cases import Case
from settings.loading import validated
from settings.tree import Settings

NEVER = 1_000_000
BOUNDARIES = (500, 1000, 2000, 4000)


def configuration(
    case: Case, *, run: str, directory: Path, prompts: Path, address: str, time_scale: float, steps: int, seed: int
) -> Settings:
    """A run of so many optimizer steps over the prompts of a file, on a broker that is there."""
    work = case.workload
    tree: dict[str, Any] = {
        "run": {"name": run, "directory": str(directory), "workers": work.workers, "seed": seed},
        "kafka": {"bootstrap_servers": address},
        "data": {"path": str(prompts)},
        "loop": {
            "groups_per_step": work.groups_per_step,
            "num_generations": 1,
            "mode": case.mode,
            "max_staleness": work.max_staleness,
            "max_completion_length": work.cap,
            "bucket_boundaries": list(BOUNDARIES),
        },
        "lengths": {"predictor": case.predictor, **case.options},
        "dispatch": {"strategy": case.dispatch},
        "generation": {"engine": "emulated", "max_num_seqs": work.slots},
        "training": {"backend": "emulated", "max_steps": steps, "checkpoint_every": NEVER},
        "emulation": {
            "time_scale": time_scale,
            "decode": work.decode.model_dump(mode="json"),
            "lengths": {"source": "column", "max_tokens": work.cap, "prompt_characters_per_token": 1e6},
            "training": {"forward_backward_s_per_token": work.train_s_per_token},
        },
    }
    return validated(tree)
