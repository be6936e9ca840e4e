"""``python -m benchmarks.demo``: runs the demo and its control for each seed and engine that the results lack."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, STREAMRL, launch, output_of
from benchmarks.conditions import conditions
from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo.warm_start import ensure_warm_started_model
from streamrl.settings.placement import ProcessPlace

HERE = Path(__file__).parent
ENGINES = ("transformers", "vllm")
LIMIT_S = 3600.0
"""A demo that takes longer is ended; it takes minutes."""
LIBRARIES = ("torch", "transformers", "numpy")
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
    pythons = {"transformers": sys.executable, "vllm": options.vllm_python}
    for seed in map(int, options.seeds.split(",")):
        there = {row["engine"] for row in rows if row["seed"] == seed and not options.again}
        if not (wanted := {engine: pythons[engine] for engine in engines if engine not in there}):
            continue
        measured = rows_of_seed(wanted, seed)
        others = [row for row in rows if row["seed"] != seed or row["engine"] not in wanted]
        rows = sorted([*others, *measured], key=lambda each: (each["engine"], each["seed"]))
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(rows, indent=1) + "\n")
        print(*map(line, measured), sep="\n", flush=True)
    return rows


def rows_of_seed(pythons: dict[str, str], seed: int) -> list[dict[str, Any]]:
    """One demo per engine as a user starts it, one after the other; then each one's control, side by side.

    A control gets the processor time that its demo took, and has one thread, so that two of them leave each other be.

    Raises:
        RuntimeError: one of them failed.
    """
    began = time.monotonic()
    model = ensure_warm_started_model(cache_root(), seed, lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-demo-") as scratch, ThreadPoolExecutor() as side_by_side:
        demos = {engine: _demo(python, engine, seed, Path(scratch) / engine) for engine, python in pythons.items()}
        controls = {
            engine: side_by_side.submit(_control, model, seed, spent, Path(scratch) / f"{engine}.json")
            for engine, (_, spent) in demos.items()
        }
        return [
            row_of(summary, controls[engine].result())
            | {"cpu_seconds": round(spent, 1), "conditions": conditions(began, seed, LIBRARIES, "make bench-demo")}
            for engine, (summary, spent) in demos.items()
        ]


def _demo(python: str, engine: str, seed: int, directory: Path) -> tuple[dict[str, Any], float]:
    """Its ``summary.json``, and the processor seconds of all that it started."""
    # Broker and both evaluations included, which the control need not do: it gets rather more than the training.
    where = (f"--run.directory={directory}", "--run.name=demo")
    command = [python, *STREAMRL[1:], "demo", "--engine", engine, "--seed", str(seed), *where]
    log = directory.with_suffix(".log")
    launched = launch(command, {}, sorted(os.sched_getaffinity(0)), LIMIT_S, log)
    if launched.exit_code != 0:
        raise RuntimeError(f"expected {' '.join(command)} to succeed, got {launched.exit_code}: {log.read_text()}")
    return json.loads((directory / "demo" / "summary.json").read_text()), launched.cpu_seconds


def _control(model: Path, seed: int, seconds: float, out: Path) -> dict[str, Any]:
    arguments = (str(model), str(seed), str(seconds), str(out))
    output_of([sys.executable, "-m", "benchmarks.demo.control", *arguments], ProcessPlace().environment)
    control: dict[str, Any] = json.loads(out.read_text())
    return control


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


if __name__ == "__main__":
    main()
