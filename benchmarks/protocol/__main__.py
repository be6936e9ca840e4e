"""``python -m benchmarks.protocol``: a demo's trajectories, trained with the protocol on and off, in turns."""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.protocol.trial import Recording, step_seconds
from benchmarks.protocol.variants import VARIANTS
from deploy.broker.cluster import start_cluster
from deploy.broker.jvm.jars import KAFKA_VERSION
from deploy.inspection.source import open_run

RESULTS = Path(__file__).parents[1] / "results" / "protocol.json"
DEMO = "protocol-bench-demo"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.protocol", description=__doc__)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each trainer")
    parser.add_argument("--rounds", type=int, default=5, help="each round trains once in every way, in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="streamrl-protocol-") as name:
        result = _measure(options, Path(name))
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {options.results}")
    return result


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    recording = _record(options, folder)
    print(f"{len(recording.records)} trajectories of a demo", flush=True)
    taken: dict[str, list[list[float]]] = {variant.name: [] for variant in VARIANTS}
    with start_cluster(folder / "kafka") as cluster:
        for turn in range(options.rounds):
            order = VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]
            for number, variant in enumerate(order):
                run = f"r{turn}-{number}"
                seconds = step_seconds(recording, variant, cluster.bootstrap_servers, folder, run, options.steps)
                taken[variant.name].append(seconds)
                mean = statistics.fmean(seconds)
                print(f"round {turn + 1}/{options.rounds} {variant.name}: {mean:.4f} s/step", flush=True)
    return _summary(options, taken)


def _typical_step_s(rounds: list[list[float]]) -> float:
    """Mean over the steps of each one's median over the rounds.

    A step trains the same groups in every round, so its median leaves out what else the machine did in one of them,
    and keeps what belongs to the step, such as a checkpoint.
    """
    return statistics.fmean(statistics.median(same_step) for same_step in zip(*rounds, strict=True))


def _record(options: argparse.Namespace, folder: Path) -> Recording:
    """Run a demo for its trajectories."""
    streamrl = [sys.executable, "-m", "deploy.cli.app"]
    where = (f"--run.name={DEMO}", f"--run.directory={folder}", f"--training.max_steps={options.steps + 10}")
    subprocess.run([*streamrl, "demo", "--seed", str(options.seed), *where], check=True)
    run = open_run(folder / DEMO)
    subprocess.run([*streamrl, "export", str(folder / DEMO), "--to", str(folder / "export")], check=True)
    partitions = run.settings.loop.trajectory_partitions
    return asyncio.run(Recording.of(run.name, run.directory.config, folder / "export", partitions))


def _summary(options: argparse.Namespace, taken: dict[str, list[list[float]]]) -> dict[str, Any]:
    off_s = _typical_step_s(taken[VARIANTS[0].name])
    rows = []
    for variant in VARIANTS:
        rounds = taken[variant.name]
        typical_s = _typical_step_s(rounds)
        rows.append(
            {
                "variant": variant.name,
                "means": variant.means,
                "step_s": round(typical_s, 5),
                "cost": round(typical_s / off_s - 1, 4),
                "mean_step_s_by_round": [round(statistics.fmean(seconds), 5) for seconds in rounds],
                "median_step_s_by_round": [round(statistics.median(seconds), 5) for seconds in rounds],
            }
        )
        print(f"{variant.name}: {typical_s:.4f} s a step, {typical_s / off_s - 1:+.1%}")
    return {
        "rows": rows,
        "steps": options.steps,
        "rounds": options.rounds,
        "seed": options.seed,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, Apache Kafka {KAFKA_VERSION}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "does_not_show": "runs in which generation shares the cores; models other than the demo's 0.94 M parameters",
    }


if __name__ == "__main__":
    main()
