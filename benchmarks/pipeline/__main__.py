"""``python -m benchmarks.pipeline``: computes rows in virtual time, measures a few by the clock, writes what came."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, conditions, rounded, write_results
from benchmarks.pipeline.cases import BASELINES, DISPATCH, Case, main_cases, measured_cases, sweep_cases
from benchmarks.pipeline.paper import compare
from benchmarks.pipeline.recording import row_of
from benchmarks.pipeline.running import Run, run_virtually, stage
from benchmarks.pipeline.showing import write_gantt, write_sweeps

PARTS = ("main", "sweep", "paper", "measured")
IDENTITY = ("measured", "workload", "group", "mode", "dispatch", "lengths")
KEPT = 0.98
"""Of the best baseline's throughput, what skewness-aware dispatch must reach in every cell of the sweep."""
QUICK_STEPS = 2
LIBRARIES = ("aiokafka", "numpy", "lightgbm")
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Do the parts that the arguments name; what is not done anew keeps its rows, and what is done is kept at once."""
    options, began = _parser().parse_args(arguments), time.monotonic()
    pictures = options.results.parent / "pipeline"
    for part in options.only:
        match part:
            case "main":
                _compute(options, main_cases())
            case "sweep":
                _compute(options, sweep_cases())
            case "paper":
                _keep(options, compare(2 if options.quick else 6))
            case "measured":
                for run, row in _measured(options):
                    _keep(options, [row])
                    write_gantt(pictures, run)
    found = read_results(options.results)
    # Of the rows by the clock and of the computed ones apart: only the former depend on the machine.
    kind = "measured" if "measured" in options.only else "computed"
    command = f"python -m benchmarks.pipeline --only {' '.join(options.only)}"
    found["conditions"][kind] = conditions(began, options.seed, LIBRARIES, command)
    _write(options.results, found)
    write_sweeps(pictures, found["rows"])
    for cell in found["cells"]:
        if cell["over_best"] < KEPT:
            print(f"below {KEPT} of the best baseline: {cell}", flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to do; the others stay")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="NAME", help="beginnings of the names of cases")
    parser.add_argument("--quick", action="store_true", help="two measured steps a case, two seeds a figure")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compute at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS / "pipeline.json")
    return parser


def _chosen(options: argparse.Namespace, cases: Iterable[Case]) -> list[Case]:
    wanted = [case for case in cases if any(case.name.startswith(beginning) for beginning in options.cases)]
    return [replace(case, steps=QUICK_STEPS) if options.quick else case for case in wanted]


def _compute(options: argparse.Namespace, cases: Iterable[Case]) -> None:
    chosen = _chosen(options, cases)
    # Processes: a simulation is pure Python on one core.
    with ProcessPoolExecutor(options.processes) as pool:
        for number, row in enumerate(pool.map(partial(computed, seed=options.seed), chosen), start=1):
            print(f"{number}/{len(chosen)} {_said(row)}", flush=True)
            _keep(options, [row])


def computed(case: Case, seed: int) -> Row:
    """A case's row, in virtual time."""
    return row_of(case, run_virtually(case, seed), measured=False)


def _measured(options: argparse.Namespace) -> Iterator[tuple[Run, Row]]:
    chosen = _chosen(options, measured_cases())
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder, stage(Path(folder), options.seed) as place:
        for number, case in enumerate(chosen, start=1):
            run = place.play(case)
            row = row_of(case, run.recording, measured=True)
            print(f"{number}/{len(chosen)} {_said(row)}; took {run.seconds:.0f} s", flush=True)
            yield run, row


def _said(row: Row) -> str:
    names = "{workload} group {group} {mode} {dispatch} {lengths}".format(**row)
    return (
        f"{names}: {row['tokens_per_s']:.0f} tokens/s, step {row['step_s']:.1f} s, {row['of_ceiling']:.0%} of ceiling"
    )


def read_results(path: Path) -> dict[str, Any]:
    """``rows`` of earlier runs, ``cells`` of the sweep that follow, and under which ``conditions`` they came about."""
    if not path.exists():
        return {"conditions": {}, "rows": [], "cells": []}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """New rows in place of old ones of the same identity, and behind them those that are really new."""
    by_identity = {tuple(row[name] for name in IDENTITY): row for row in (*old, *new)}
    return list(by_identity.values())


def with_ratios(rows: list[Row]) -> list[Row]:
    """With the throughput of each as a multiple of synchronous round robin's on the same workload, of the same kind.

    In tokens, not in trajectories: asynchronous steps may hold the short completions of later batches, and a window of
    a few steps would count them as progress.
    """
    bases = {
        _cell(row): row["tokens_per_s"]
        for row in rows
        if (row["mode"], row["dispatch"]) == ("synchronous", "round_robin")
    }
    return [
        row
        if row["mode"] == "generation_alone"
        else {**row, "ratio_to_synchronous": _ratio(row, bases.get(_cell(row)))}
        for row in rows
    ]


def _cell(row: Row) -> tuple[Any, ...]:
    return row["measured"], row["workload"], row["group"]


def _ratio(row: Row, base: float | None) -> float | None:
    return row["tokens_per_s"] / base if base else None


def cells(rows: list[Row]) -> list[Row]:
    """The sweep, a row for each workload and mode: what each strategy reaches, and skewness-aware over the best other.

    Throughputs as multiples of synchronous round robin's.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["workload"].startswith("sweep/"):
            cell = found.setdefault((row["workload"], row["mode"]), {})
            cell[row["dispatch"]] = row["ratio_to_synchronous"]
    return [
        {"workload": workload.partition("/")[2], "mode": mode}
        | cell
        | {"over_best": cell["skewness_aware"] / max(cell[name] for name in BASELINES)}
        for (workload, mode), cell in found.items()
        if all(cell.get(name) for name in DISPATCH)
    ]


def _keep(options: argparse.Namespace, new: list[Row]) -> None:
    """Put new rows into the file; ratios and cells follow from all that are there."""
    found = read_results(options.results)
    found["rows"] = with_ratios(merged(found["rows"], new))
    found["cells"] = cells(found["rows"])
    _write(options.results, found)


def _write(path: Path, found: dict[str, Any]) -> None:
    tables = {name: rounded(found[name], 5) for name in ("rows", "cells")}
    write_results(path, {"conditions": found["conditions"], **tables}, tables)


if __name__ == "__main__":
    main()
