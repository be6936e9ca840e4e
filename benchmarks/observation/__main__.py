"""``python -m benchmarks.observation``: the demo with metrics and viewers on and off, in turns."""

import argparse
import json
import os
import platform
import statistics
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.observation.trial import VARIANTS, step_seconds
from deploy.broker.jvm.jars import KAFKA_VERSION

RESULTS = Path(__file__).parents[1] / "results" / "observation.json"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observation", description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of each demo")
    parser.add_argument("--rounds", type=int, default=5, help="each round runs every variant once, in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="streamrl-observation-") as name:
        result = _summary(options, _measured(options, Path(name)))
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {options.results}")
    return result


def _measured(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Mean seconds of a step, by variant and round."""
    means: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    for turn in range(options.rounds):
        for variant in VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]:
            name = f"r{turn}-{VARIANTS.index(variant)}"
            seconds = step_seconds(variant, folder, name, options.steps, options.seed)
            means[variant.name].append(statistics.fmean(seconds))
            print(f"round {turn + 1}/{options.rounds} {variant.name}: {means[variant.name][-1]:.4f} s/step", flush=True)
    return means


def _summary(options: argparse.Namespace, means: dict[str, list[float]]) -> dict[str, Any]:
    base = statistics.median(means[VARIANTS[0].name])
    rows = []
    for variant in VARIANTS:
        typical = statistics.median(means[variant.name])
        rows.append(
            {
                "variant": variant.name,
                "means": variant.means,
                "step_s": round(typical, 5),
                "cost": round(1 - base / typical, 4),
                "step_s_by_round": [round(seconds, 5) for seconds in means[variant.name]],
            }
        )
        print(f"{variant.name}: {typical:.4f} s a step, throughput {base / typical - 1:+.1%}")
    return {
        "rows": rows,
        "steps": options.steps,
        "rounds": options.rounds,
        "seed": options.seed,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}; viewers share them with the run",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, Apache Kafka {KAFKA_VERSION}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "does_not_show": "what a page costs the browser that draws it; runs of other sizes than the demo's",
    }


if __name__ == "__main__":
    main()
