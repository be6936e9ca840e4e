"""``python -m benchmarks.agents``: what an environment of verifiers, which knows nothing of ours, teaches a tiny model.

Does what a user would: `streamrl init --example calculator`, a chat template for its model, which has none, and
`streamrl run` with ``verifiers:verifiers_calculator`` (beside this file, written with verifiers alone) in place of the
calculator that comes along. The rewards are those of the run's steps; its audit has to balance.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import streamrl
from benchmarks.conditions import conditions

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "agents.json"
ENVIRONMENT = "verifiers:verifiers_calculator"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The conversation as one text that grows, which is what the model has learnt to read."""
ENDS = 5
"""Steps whose mean is told, of the first and of the last ones."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train and write as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-agents-") as scratch:
        result = measure(options, Path(scratch) / "sums")
    result["conditions"] = conditions(began, options.seed, ("torch", "transformers", "verifiers"), "make bench-agents")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return result


def measure(options: argparse.Namespace, task: Path) -> dict[str, Any]:
    """The rewards of a whole run, and what its audit says."""
    command = [sys.executable, "-m", "streamrl.cli.app"]
    subprocess.run([*command, "init", "--example", "calculator", str(task)], check=True)
    (task / "model" / "chat_template.jinja").write_text(TEMPLATE)
    overrides = [
        *("--environments.names", json.dumps([ENVIRONMENT]), "--environments.environment", '["PYTHONPATH"]'),
        *(f"--training.max_steps={options.steps}", f"--run.seed={options.seed}"),
    ]
    shutil.copy(HERE / "verifiers_calculator.py", task)
    subprocess.run(
        [*command, "run", "--no-top", "streamrl.toml", *overrides],
        cwd=task,
        env={**os.environ, "PYTHONPATH": str(task)},
        check=True,
    )
    run = streamrl.Run(task / "runs" / task.name)
    steps = run.steps().to_pylist()
    report = run.audit()
    if not report.is_balanced:
        raise SystemExit(f"expected a run whose audit balances, got: {report.violations}")
    rewards = [round(step["reward"], 3) for step in steps]
    return {
        "environment": ENVIRONMENT,
        "steps": len(rewards),
        "sessions": report.sessions,
        "turns": report.turns,
        "reward_first": round(fmean(rewards[:ENDS]), 3),
        "reward_last": round(fmean(rewards[-ENDS:]), 3),
        "rewards": rewards,
        "run_seconds": round(steps[-1]["sent_at"] - steps[0]["sent_at"]),
    }


if __name__ == "__main__":
    main()
