"""``python -m benchmarks.demo``: runs the demo and its control for each seed and engine that the results lack."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from bus.embedded.runtime import cache_root
from streamrl.demo.warm_start import ensure_warm_started_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINES = ("transformers", "vllm")
LIBRARIES = ("torch", "transformers", "numpy")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MOMENTS = {
    "accuracy": "",
    "sampled_accuracy": "sampled_",
    "pass_at_8": "pass_at_8_",
    "accuracy_bare": "bare_",
    "accuracy_worked": "worked_",
    "share_worked": "share_worked_",
    "mean_length": "length_",
}
"""Metrics of the demo's evaluation, and what a row calls them before ``before`` and ``after``."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure what is missing, and write after every row, so that a benchmark that was stopped goes on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3", help="divided by commas")
    parser.add_argument("--engine", choices=[*ENGINES, "both"], default="both")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "demo.json")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = json.loads(options.results.read_text()) if options.results.exists() else []
    engines = ENGINES if options.engine == "both" else (options.engine,)
    for engine in engines:
        for seed in map(int, options.seeds.split(",")):
            others = [row for row in rows if (row["engine"], row["seed"]) != (engine, seed)]
            if len(others) < len(rows) and not options.again:
                continue
            row = measured(options.vllm_python if engine == "vllm" else sys.executable, engine, seed)
            rows = sorted([*others, row], key=lambda each: (each["engine"], each["seed"]))
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(rows, indent=1) + "\n")
            print(line(row), flush=True)
    return rows


def measured(python: str, engine: str, seed: int) -> dict[str, Any]:
    """One demo as a user starts it, and then its control, which gets the processor time that the demo took.

    Raises:
        RuntimeError: one of them failed.
    """
    began = time.monotonic()
    model = ensure_warm_started_model(cache_root(), seed, lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-demo-") as scratch:
        spent = _children_cpu_s()
        where = (f"--run.directory={scratch}", "--run.name=demo")
        _run([python, "-m", "streamrl.cli.app", "demo", "--engine", engine, "--seed", str(seed), *where], {})
        # Broker and both evaluations included, which the control need not do: it gets rather more than the training.
        spent = _children_cpu_s() - spent
        summary = json.loads((Path(scratch) / "demo" / "summary.json").read_text())
        out = Path(scratch) / "control.json"
        _run([sys.executable, "-m", "benchmarks.demo.control", str(model), str(seed), str(spent), str(out)], ONE_THREAD)
        return row_of(summary, json.loads(out.read_text())) | {
            "cpu_seconds": round(spent, 1),
            "conditions": conditions(began, seed, LIBRARIES, "make bench-demo"),
        }


def row_of(summary: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
    """A row of the results, from a demo's ``summary.json`` and what ``control`` wrote."""
    row: dict[str, Any] = {"seed": summary["seed"], "engine": summary["engine"]}
    for metric, name in MOMENTS.items():
        # A style that no solution had has no accuracy.
        row |= {f"{name}{moment}": summary.get(f"{metric}_{moment}") for moment in ("before", "after")}
        row[f"control_{name}after"] = control["metrics"].get(metric)
    return row | {
        "gain": round(row["after"] - row["before"], 4),
        "control_gain": round(row["control_after"] - row["before"], 4),
        "train_seconds": summary["run_seconds"],
        "steps": summary["steps"],
        "trajectories": summary["trajectories"],
        "control_solutions": control["solutions"],
        "control_cpu_seconds": round(control["cpu_seconds"], 1),
    }


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    return (
        f"{row['engine']}, seed {row['seed']}: greedy {row['before']:.3f} → {row['after']:.3f} in "
        f"{row['train_seconds']:.0f} s, control {row['control_after']:.3f}; sampled {row['sampled_before']:.3f} → "
        f"{row['sampled_after']:.3f}, control {row['control_sampled_after']:.3f}; "
        f"length {row['length_before']:.1f} → {row['length_after']:.1f}"
    )


def _children_cpu_s() -> float:
    """Of all processes that were started here, or below here, and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    main()
