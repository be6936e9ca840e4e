"""One configuration: predicted, then run for real with emulated engine and trainer, and both beside each other."""

import json
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.commands import STREAMRL, output_of
from benchmarks.plan.cases import TIME_SCALE, Case
from streamrl.planning.prediction import Prediction, predict
from streamrl.settings.loading import load_settings
from streamrl.settings.tree import Settings

FEWEST, MOST = 5, 16
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PATIENCE_S = 300.0


def trial(case: Case, scratch: Path, address: str, wall_s: float) -> dict[str, Any]:
    """The row of a case; rates are per emulated second. The run lasts for about so many seconds of the wall clock."""
    config = scratch / f"{_slug(case)}.toml"
    tree = case.tree()
    tree["run"] |= {"name": _slug(case), "directory": str(scratch)}
    config.write_text(tomli_w.dumps(tree))
    settings = load_settings(config, [])
    first = predict(settings, steps=FEWEST)
    steps = max(FEWEST, min(MOST, 1 + round(wall_s * TIME_SCALE / first.step_s)))
    predicted = predict(settings, steps=steps)
    _run(config, address, steps)
    named = {"kind": "self-consistency", "engine": "emulated", "workers": case.workers, "mode": case.mode, "fits": True}
    return named | row_of(case.name, settings, predicted, settings.run.path / "metrics.jsonl", TIME_SCALE)


def _run(config: Path, address: str, steps: int) -> None:
    options = f"--kafka.bootstrap_servers={address}", f"--training.max_steps={steps}"
    output_of([*STREAMRL, "run", str(config), *options], ENVIRONMENT, PATIENCE_S)


def row_of(name: str, settings: Settings, predicted: Prediction, metrics: Path, time_scale: float) -> dict[str, Any]:
    """A prediction beside the steps that a run has written down; rates are per emulated second."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    counted = rows[predicted.warm_up :]
    seconds = (counted[-1]["time"] - rows[predicted.warm_up - 1]["time"]) * time_scale
    step_s = seconds / len(counted)
    waited_s = sum(row.get("time/wait_for_batch", 0.0) for row in counted) / len(counted) * time_scale
    trajectories = settings.loop.groups_per_step * settings.loop.num_generations
    return {
        "configuration": name,
        "steps": predicted.steps,
        "predicted_trajectories_per_s": round(predicted.trajectories_per_s, 4),
        "delivered_trajectories_per_s": round(trajectories / step_s, 4),
        "error": round(predicted.trajectories_per_s * step_s / trajectories - 1, 4),
        "predicted_step_s": round(predicted.step_s, 2),
        "delivered_step_s": round(step_s, 2),
        "predicted_wait_s": round(predicted.wait_for_batch_s, 2),
        "delivered_wait_s": round(waited_s, 2),
        "predicted_max_staleness": predicted.max_staleness,
        "delivered_max_staleness": int(max(row.get("off_policy/max", 0.0) for row in rows)),
    }


def _slug(case: Case) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in case.name.lower()).split())
