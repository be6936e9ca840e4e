"""``python -m benchmarks.packing``: measures padding and balance, and writes the results and the README's table."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.packing.report import write_readme
from benchmarks.packing.trial import Way, at_random, streamed, streamed_to_an_idle_trainer, try_out, whole
from benchmarks.packing.workload import WORKLOADS, Workload
from consumers.batching.settings import BatchingSettings

HERE = Path(__file__).parent
DEFAULT = BatchingSettings().lookahead
LOOKAHEADS = (1.0, 2.0, DEFAULT, 8.0)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--orders", type=int, default=5, help="random orders of arrival")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "packing.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    options = parser.parse_args(arguments)
    rows = [row for workload in WORKLOADS for row in _rows(workload, options.orders)]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(rows, indent=1) + "\n")
    write_readme(options.readme, rows, options)
    return rows


def _rows(workload: Workload, orders: int) -> Iterator[dict[str, Any]]:
    arrivals = [workload.arrivals(seed) for seed in range(orders)]
    ways: list[tuple[str, Way, float | None]] = [
        ("at random", at_random, None),
        *(("streamed", streamed, lookahead) for lookahead in LOOKAHEADS),
        ("streamed, idle trainer", streamed_to_an_idle_trainer, DEFAULT),
        ("whole batch", whole, None),
    ]
    for budget in workload.token_budgets:
        for name, way, lookahead in ways:
            settings = BatchingSettings(token_budget=budget, lookahead=lookahead or DEFAULT)
            tried = [try_out(way, each, settings) for each in arrivals]
            shares = [waste.padding for waste in tried]
            found = {"padding": round(sum(shares) / len(shares), 4), "padding_worst": round(max(shares), 4)}
            key = {"workload": workload.name, "token_budget": budget, "way": name, "lookahead": lookahead}
            yield key | tried[0].row() | found
        print(f"{workload.name}, {budget} tokens: done", flush=True)


if __name__ == "__main__":
    main()
