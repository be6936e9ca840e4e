"""``python -m benchmarks.plan``: predictions beside real runs on real engines, and beside an emulated pipeline.

The emulated rows share scheduler, curve and lengths with the prediction: they show that the simulation says what the
processes do, and nothing of how well a profile tells a machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.plan.cases import JUDGED, TIME_SCALE, TUNING
from benchmarks.plan.real import CASES, RealEngine
from benchmarks.plan.trial import trial
from streamrl.deploy.wiring.broker import broker_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARIES = ("torch", "transformers", "vllm", "aiokafka", "numpy")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--engines", nargs="*", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of a real run")
    parser.add_argument("--quick", action="store_true", help="profiles of fewer points")
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))), help="real ones, from 0")
    parser.add_argument("--emulated", nargs="*", type=int, default=[3], help="emulated configurations, from 0")
    parser.add_argument(
        "--tuning", action="store_true", help="of those that latencies are estimated from; keeps nothing"
    )
    parser.add_argument("--wall-s", type=float, default=15.0, help="seconds that an emulated run should last, about")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "plan.json")
    options, started = parser.parse_args(arguments), time.monotonic()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-bench-plan-") as scratch,
        broker_for(None, print, Path(scratch) / "kafka") as address,
    ):
        began = time.monotonic()
        for row in _rows(options, Path(scratch), address):
            rows.append(row)
            print(_line(row), f"({time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f})", flush=True)
            began = time.monotonic()
    found = {
        "conditions": conditions(started, 0, LIBRARIES, "make bench-plan"),
        "summary": summary(rows),
        "rows": rows,
    }
    if not options.tuning:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(found, indent=1) + "\n")
    return rows


def _rows(options: argparse.Namespace, scratch: Path, address: str) -> Iterator[dict[str, Any]]:
    if not options.tuning:
        recorded = None  # lengths depend on the model alone: those that the first engine's run records serve all
        for name in options.engines:
            python = options.vllm_python if name == "vllm" else sys.executable
            engine = RealEngine(name, python, scratch, address, options.steps, options.quick, recorded)
            yield from engine.rows([CASES[number] for number in options.cases])
            recorded = engine.recorded
    for number in options.emulated:
        yield trial((TUNING if options.tuning else JUDGED)[number], scratch, address, options.wall_s)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors by engine, of the cases that fit the machine."""
    found = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        errors = [row["error"] for row in rows if row["engine"] == engine and row["fits"]]
        if errors:
            mean = round(sum(map(abs, errors)) / len(errors), 4)
            found.append({"engine": engine, "cases": len(errors), "mean": mean, "worst": max(errors, key=abs)})
    return found


def _line(row: dict[str, Any]) -> str:
    scale = f", time scale {TIME_SCALE:g}" if row["engine"] == "emulated" else ""
    return (
        f"{row['engine']}{scale}, {row['configuration']:30} predicted {row['predicted_trajectories_per_s']:7.3f} "
        f"trajectories/s, delivered {row['delivered_trajectories_per_s']:7.3f} ({row['error']:+.1%}); "
        f"waits {row['predicted_wait_s']:.1f} / {row['delivered_wait_s']:.1f} s; "
        f"staleness {row['predicted_max_staleness']} / {row['delivered_max_staleness']}"
    )


if __name__ == "__main__":
    main()
