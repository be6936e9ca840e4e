"""From what the contenders saved to learning curves: evaluates offline, in processes of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders.plan import Trained
from benchmarks.peers.judging.curves import Point


@dataclass(frozen=True)
class HeldOut:
    """How weights are judged: prompts, answers, sampling temperature (0: greedy), longest completion, processes."""

    policy: Path
    prompts: Path
    answer_pattern: str
    temperature: float
    limit: int
    processes: int


@dataclass(frozen=True)
class Judged:
    """A run with its learning curve; ``parts``: the rewards of sums and of products, in the curve's order."""

    trained: Trained
    curve: tuple[Point, ...]
    parts: dict[str, tuple[float, ...]]


def judge(trained: Trained, held_out: HeldOut, folder: Path) -> Judged:
    """The learning curve of a run, from the common policy on.

    Raises:
        subprocess.CalledProcessError: weights could not be evaluated.
    """
    models = [held_out.policy, *(saved.weights for saved in trained.saved)]
    rows = _evaluated(models, held_out, folder)
    moments = [(0, 0.0), *((saved.step, saved.seconds) for saved in trained.saved)]
    curve = tuple(Point(step, seconds, row["reward"]) for (step, seconds), row in zip(moments, rows, strict=True))
    return Judged(trained, curve, {name: tuple(row["parts"][name] for row in rows) for name in rows[0]["parts"]})


def _evaluated(models: Sequence[Path], held_out: HeldOut, folder: Path) -> list[dict[str, Any]]:
    """One row for each model, in order. The processes share them out; one thread each is fastest for small models."""
    shares = [models[number :: held_out.processes] for number in range(held_out.processes)]
    tasks = [folder / f"evaluation{number}.json" for number in range(held_out.processes)]
    with ThreadPoolExecutor(held_out.processes) as pool:
        shared = list(pool.map(partial(_rows, held_out), shares, tasks))
    rows = {row["weights"]: row for share in shared for row in share}
    return [rows[str(model)] for model in models]


def _rows(held_out: HeldOut, models: Sequence[Path], task: Path) -> list[dict[str, Any]]:
    settings = vars(held_out) | {name: str(getattr(held_out, name)) for name in ("policy", "prompts")}
    task.write_text(json.dumps(settings | {"models": [str(model) for model in models]}))
    with task.with_suffix(".log").open("w") as errors:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.judging.evaluation", str(task)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
