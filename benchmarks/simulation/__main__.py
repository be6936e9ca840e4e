"""``python -m benchmarks.simulation``: simulates the papers' configurations and larger ones, writes what came.

Parts, each of some minutes (``--only``): ``stages`` and ``fit`` find what no paper says and write ``parameters.json``;
``streamrl``, ``laminar`` (``--models``), ``details`` and ``scale`` simulate rows. ``--shard 0/4`` does a quarter.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, conditions, rounded, write_results
from benchmarks.simulation import fitting, parameters, summary
from benchmarks.simulation.details import Detail, place
from benchmarks.simulation.papers import IDENTITY
from benchmarks.simulation.rows import PARTS, Task, tasks

STAGES = Path(__file__).with_name("stages.json")
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """Do the parts that the arguments name; rows that are not done anew stay."""
    options, began = _parser().parse_args(arguments), time.monotonic()
    command = f"python -m benchmarks.simulation --only {' '.join(options.only)}"
    seeds = list(range(options.seeds or 5))
    # Of the tree that computes: rows are written as they come, and then the tree has changes, its own.
    commit = conditions(began, seeds, (), command)["commit"]
    if "stages" in options.only:
        _stages(options.processes)
    if "fit" in options.only:
        _fit(options.results)
    todo = list(chain.from_iterable(tasks(part) for part in PARTS if part in options.only))
    number, of = map(int, options.shard.split("/"))
    todo = [task for task in todo if not options.models or task.model in options.models][number::of]
    todo.sort(key=lambda task: task.rank())
    if options.seeds:
        todo = [replace(task, seeds=options.seeds) for task in todo]
    if options.missing:
        rows = read(options.results)["rows"]
        todo = [task for task in todo if not _is_there(task, rows)]
    with ProcessPoolExecutor(options.processes) as pool:
        for done, rows in enumerate(_simulated(pool, todo), start=1):
            print(f"{done}/{len(todo)} {json.dumps(_short(rows[0]))}", flush=True)
            keep(options.results, rows)
    results = finished(read(options.results))
    said = conditions(began, seeds, ("numpy", "scipy"), command) | {"commit": commit}
    results["conditions"] |= dict.fromkeys(options.only, said)
    write(options.results, results)
    summary.draw(options.results.with_suffix(".png"), results["rows"])


def _stages(processes: int) -> None:
    found: dict[str, list[Row]] = {"laminar": [], "streamrl": []}
    with ProcessPoolExecutor(processes) as pool:
        for paper, todo in (("streamrl", fitting.streamrl_stages()), ("laminar", fitting.laminar_stages())):
            for row in pool.map(fitting.stage, todo):
                print(json.dumps(row)[:200], flush=True)
                found[paper].append(row)
    STAGES.write_text(json.dumps(found, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=("stages", "fit", *PARTS), default=["stages", "fit", *PARTS])
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="rows of these models alone")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every N-th of the rows, from the K-th on")
    parser.add_argument("--missing", action="store_true", help="only rows that are not there with as many seeds")
    parser.add_argument("--seeds", type=int, default=0, help="in place of each row's own number")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compute at once")
    parser.add_argument("--results", type=Path, default=RESULTS / "simulation.json")
    return parser


def _simulated(pool: ProcessPoolExecutor, todo: Iterable[Task | Detail]) -> Iterator[list[Row]]:
    # As they come: a row that takes long must not keep others from the file.
    for future in as_completed([pool.submit(task.rows) for task in todo]):
        yield future.result()


def _is_there(task: Task | Detail, rows: Iterable[Row]) -> bool:
    """Whether its row is in the file, with as many seeds."""
    own = place(task)
    seeds = (row.get("seeds", task.seeds) for row in rows if {name: row[name] for name in IDENTITY} == own)
    return max(seeds, default=0) >= task.seeds


def _short(row: Row) -> Row:
    return {name: row.get(name) for name in summary.SHOWN[1:]}


def _fit(path: Path) -> None:
    stages = json.loads(STAGES.read_text())
    file = json.loads(parameters.FILE.read_text())
    results = read(path)
    results["choices"], results["composed"] = [], []
    for paper, observations, terms in (
        ("laminar", fitting.laminar_observations(stages["laminar"]), fitting.LAMINAR_TERMS),
        ("streamrl", fitting.streamrl_observations(stages["streamrl"]), fitting.STREAMRL_TERMS),
    ):
        values, forms, tried = fitting.chosen(observations, fitting.ALWAYS[paper], terms)
        names = {name: term for term, form in forms.items() for name in terms[term][form]}
        file["fitted"][paper] = {
            name: {"value": float(f"{value:.4g}"), "fitted": paper, "form": forms.get(names.get(name, ""), "always")}
            for name, value in values.items()
        }
        results["choices"] += list(fitting.told(paper, terms, forms, values))
        results["forms"][paper] = {"chosen": forms, "tried": sorted(tried, key=lambda one: one["error"])}
        results["composed"] += [one.row(values) for one in observations]
        print(forms, {name: float(f"{value:.4g}") for name, value in values.items()}, tried[:1], flush=True)
    parameters.FILE.write_text(json.dumps(file, indent=1) + "\n")
    write(path, results)


def read(path: Path) -> dict[str, Any]:
    """Rows and conditions of earlier runs."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"conditions": {}, "forms": {}, "choices": [], "composed": [], "rows": []}


def keep(path: Path, new: list[Row]) -> None:
    """New rows in place of those of the same identity."""
    results = read(path)
    by_identity = {tuple(row.get(name) for name in IDENTITY): row for row in (*results["rows"], *new)}
    results["rows"] = list(by_identity.values())
    write(path, finished(results))


def finished(results: dict[str, Any]) -> dict[str, Any]:
    """With the rows that follow from others, and errors summed up."""
    own = [row for row in results["rows"] if "cpu_s" in row]
    rows = [*own, *summary.derived(own)]
    summed = summary.summed_up(rows)
    composed = summary.errors(summary.summed_up(results.get("composed", [])))
    tables = {
        "errors": [{"rows_are": "simulated", **one} for one in summary.errors(summed)]
        + [{"rows_are": "composed", **one} for one in composed],
        "scale": list(summary.scaled(rows)),
    }
    return {**results, "summary": summed, **tables, "rows": rows}


def write(path: Path, results: dict[str, Any]) -> None:
    """Write them, the rows last."""
    others = {name: value for name, value in results.items() if name != "rows"}
    write_results(path, rounded({**others, "rows": results["rows"]}))


if __name__ == "__main__":
    main()
