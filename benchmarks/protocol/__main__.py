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
    medians: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    totals: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    with start_cluster(folder / "kafka") as cluster:
        for turn in range(options.rounds):
            order = VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]
            for number, variant in enumerate(order):
                run = f"r{turn}-{number}"
                seconds = step_seconds(recording, variant, cluster.bootstrap_servers, folder, run, options.steps)
                medians[variant.name].append(statistics.median(seconds))
                totals[variant.name].append(statistics.fmean(seconds))
                print(
                    f"round {turn + 1}/{options.rounds} {variant.name}: {totals[variant.name][-1]:.4f} s/step",
                    flush=True,
                )
    return _summary(options, medians, totals)


def _record(options: argparse.Namespace, folder: Path) -> Recording:
    """Run a demo for its trajectories."""
    streamrl = [sys.executable, "-m", "deploy.cli.app"]
    where = (f"--run.name={DEMO}", f"--run.directory={folder}", f"--training.max_steps={options.steps + 10}")
    subprocess.run([*streamrl, "demo", "--seed", str(options.seed), *where], check=True)
    run = open_run(folder / DEMO)
    subprocess.run([*streamrl, "export", str(folder / DEMO), "--to", str(folder / "export")], check=True)
    partitions = run.settings.loop.trajectory_partitions
    return asyncio.run(Recording.of(run.name, run.directory.config, folder / "export", partitions))


def _summary(
    options: argparse.Namespace, medians: dict[str, list[float]], totals: dict[str, list[float]]
) -> dict[str, Any]:
    base = VARIANTS[0].name
    rows = []
    for variant in VARIANTS:
        ratios = [mine / off - 1 for mine, off in zip(totals[variant.name], totals[base], strict=True)]
        median_ratios = [mine / off - 1 for mine, off in zip(medians[variant.name], medians[base], strict=True)]
        rows.append(
            {
                "variant": variant.name,
                "means": variant.means,
                "mean_step_s": [round(value, 5) for value in totals[variant.name]],
                "median_step_s": [round(value, 5) for value in medians[variant.name]],
                "cost_of_mean_step": round(statistics.median(ratios), 4),
                "cost_of_median_step": round(statistics.median(median_ratios), 4),
            }
        )
        print(
            f"{variant.name}: {rows[-1]['cost_of_mean_step']:+.1%} a step (mean), "
            f"{rows[-1]['cost_of_median_step']:+.1%} (median)"
        )
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
