"""``python -m benchmarks.algorithms``: the shelf's losses and curves, and many consumers of one stream, part by part.

- ``shelf``: every loss against naive formulas and TRL's, and what each algorithm learns (``shelf.py``);
- ``attached``: generation throughput with 0 to 8 attached instances (``attached.py``);
- ``shared``: three algorithms on one stream against each on a run of its own (``shared.py``);
- ``live``: four algorithms learn the demo's task on one stream, alone and disturbed (``live.py``);
- ``graders``: completions graded a second by 1, 2 and 4 members, and what waits for them (``graders.py``).

A part that is not asked for keeps what the file has of it.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions

RESULTS = Path(__file__).parents[1] / "results" / "algorithms.json"
LIBRARIES = {
    "shelf": ("torch", "transformers"),
    "attached": ("aiokafka", "torch"),
    "shared": ("aiokafka", "torch"),
    "live": ("aiokafka", "torch", "transformers"),
    "graders": ("aiokafka",),
}
"""The parts, in the order in which they are measured, and what each depends on."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say; each part is written as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES), help="parts, else all")
    parser.add_argument("--cases", type=int, default=20, help="shelf: seeded batches for each loss")
    parser.add_argument("--sweeps", type=int, default=2, help="attached: up to 8 instances and down again, at most")
    parser.add_argument("--window-s", type=float, default=15.0, help="attached: of each measured stretch")
    parser.add_argument("--steps", type=int, default=40, help="shared: optimizer steps of each algorithm")
    parser.add_argument("--live-steps", type=int, default=160, help="live: optimizer steps of each algorithm")
    parser.add_argument("--graders-seconds", type=float, default=15.0, help="graders: for each number of members")
    parser.add_argument("--seed", type=int, default=0, help="attached, shared: of lengths; live: of all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    for part in (name for name in LIBRARIES if name in options.only):
        began = time.monotonic()
        print(f"{part}:", flush=True)
        found = _measured(part, options)
        about = conditions(began, _seeds(part, options), LIBRARIES[part], f'make bench-algorithms ARGS="--only {part}"')
        result |= with_conditions(part, found, about)
        kept = json.loads(options.results.read_text()) if options.results.is_file() else {}
        options.results.write_text(json.dumps(kept | result, indent=2) + "\n")
        print(f"{part}: {about['seconds']} s, written to {options.results}", flush=True)
    return result


def with_conditions(part: str, found: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The part's figures with where they come from: ``conditions`` of the shelf, ``<part>_conditions`` of others.

    What a part itself says under ``conditions`` is added to them.
    """
    key = "conditions" if part == "shelf" else f"{part}_conditions"
    figures = {name: value for name, value in found.items() if name != "conditions"}
    return figures | {key: {**about, **found.get("conditions", {})}}


def _measured(part: str, options: argparse.Namespace) -> dict[str, Any]:
    # Imported when it is its turn: the shelf brings torch, which other parts leave to the processes that need it.
    module = import_module(f"benchmarks.algorithms.{part}")
    given = {
        "shelf": (options.cases,),
        "attached": (options.sweeps, options.window_s, options.seed),
        "shared": (options.steps, options.seed),
        "live": (options.live_steps, options.seed),
        "graders": (options.graders_seconds,),
    }
    found: dict[str, Any] = module.measured(*given[part])
    return found


def _seeds(part: str, options: argparse.Namespace) -> int | list[int]:
    return list(range(options.cases)) if part == "shelf" else options.seed


if __name__ == "__main__":
    # As Ctrl-C: what was started is ended before this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
