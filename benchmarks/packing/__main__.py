"""``python -m benchmarks.packing``: measures padding, its cost and balance, and prompts that are computed once."""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.packing.trial import (
    Waste,
    Way,
    at_random,
    streamed,
    streamed_to_an_idle_trainer,
    try_out,
    try_out_packed,
    whole,
)
from benchmarks.packing.workload import DEMO, WORKLOADS, Workload
from streamrl.consumers.batching.micro_batches import LOOKAHEAD
from streamrl.consumers.batching.settings import BatchingSettings

HERE = Path(__file__).parent
DEFAULT = LOOKAHEAD
LOOKAHEADS = (1.0, 2.0, DEFAULT, 8.0)
PRETRAINED_WAYS, PRETRAINED_SAMPLES, PRETRAINED_BUDGET = ("streamed", "whole batch", "packed"), 64, 2048
"""Of a model a hundred times larger: fewer samples, so that a turn takes minutes."""
LIBRARIES = ("torch", "transformers", "numpy")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--orders", type=int, default=5, help="random orders of arrival")
    parser.add_argument("--workloads", nargs="+", default=[workload.name for workload in WORKLOADS])
    parser.add_argument("--repetitions", type=int, default=5, help="of the computation; 0: none")
    parser.add_argument("--only-shared", action="store_true", help="measure prompts computed once; keep other results")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "packing.json")
    options, began = parser.parse_args(arguments), time.monotonic()
    found: dict[str, Any] = json.loads(options.results.read_text()) if options.only_shared else {}
    if not options.only_shared:
        chosen = [workload for workload in WORKLOADS if workload.name in options.workloads]
        rows = [row for workload in chosen for row in _rows(workload, options.orders)]
        found = {"rows": rows, "compute": list(_computed(options.repetitions))}
        found = {"conditions": _conditions(began, options.orders)} | found
    began = time.monotonic()
    shared = list(_shared(options.repetitions))
    found |= {"shared": shared, "shared_conditions": _conditions(began, options.orders)}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _conditions(began: float, orders: int) -> dict[str, Any]:
    return conditions(began, list(range(orders)), LIBRARIES, "make bench-packing")


def _shared(repetitions: int) -> Iterator[dict[str, Any]]:
    if not repetitions:
        return
    # Imported here, as for ``_computed``.
    import torch

    from benchmarks.packing.shared import shared_rows

    torch.set_num_threads(1)
    for row in shared_rows(min(repetitions, 2)):
        print(row, flush=True)
        yield row


def _rows(workload: Workload, orders: int) -> Iterator[dict[str, Any]]:
    arrivals = [workload.arrivals(seed) for seed in range(orders)]
    ways: list[tuple[str, Way | None, float | None]] = [
        ("packed, no padding", None, None),
        ("at random", at_random, None),
        *(("streamed", partial(streamed, lookahead=lookahead), lookahead) for lookahead in LOOKAHEADS),
        ("streamed, idle trainer", streamed_to_an_idle_trainer, DEFAULT),
        ("whole batch", whole, None),
    ]
    for budget in workload.token_budgets:
        for name, way, lookahead in ways:
            settings = BatchingSettings(token_budget=budget)
            tried: list[Waste] = [
                try_out_packed(each, settings) if way is None else try_out(way, each, settings) for each in arrivals
            ]
            shares = [waste.padding for waste in tried]
            found = {"padding": round(sum(shares) / len(shares), 4), "padding_worst": round(max(shares), 4)}
            key = {"workload": workload.name, "token_budget": budget, "way": name, "lookahead": lookahead}
            yield key | tried[0].row() | found
        print(f"{workload.name}, {budget} tokens: done", flush=True)


def _computed(repetitions: int) -> Iterator[dict[str, Any]]:
    if not repetitions:
        return
    # Imported here: they load torch, which counting padding does without.
    import torch

    from benchmarks.packing.compute import computed
    from benchmarks.small_model import build

    torch.set_num_threads(1)
    (budget,) = DEMO.token_budgets
    settings = BatchingSettings(token_budget=budget)
    for row in computed(build(positions=1024), DEMO.arrivals(0), settings, repetitions):
        print(row, flush=True)
        yield {"model": "1 million parameters, float32", "token_budget": budget} | row
    settings = BatchingSettings(token_budget=PRETRAINED_BUDGET)
    arrivals = DEMO.arrivals(0)[:PRETRAINED_SAMPLES]
    for row in computed(_pretrained(), arrivals, settings, min(repetitions, 2), PRETRAINED_WAYS, in_bfloat16=True):
        print(row, flush=True)
        yield {"model": "SmolLM2-135M, bfloat16", "token_budget": PRETRAINED_BUDGET} | row


def _pretrained() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from streamrl.init.smollm2 import ensure_smollm2

    return AutoModelForCausalLM.from_pretrained(ensure_smollm2(print), dtype=torch.float32)


if __name__ == "__main__":
    main()
