"""``python -m benchmarks.pipeline``: runs the cases, computes the rest, writes rows, pictures and tables."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.pipeline.cases import CASES, Case
from benchmarks.pipeline.results import Row, merged, read_rows, write_rows
from benchmarks.pipeline.running.rows import row_of, with_ratios
from benchmarks.pipeline.running.wall_clock import Run, stage
from benchmarks.pipeline.showing.gantt import write_gantt, write_overviews
from benchmarks.pipeline.showing.plots import write_plots
from benchmarks.pipeline.showing.table import facts, write_tables
from benchmarks.pipeline.studies.paper import compare
from benchmarks.pipeline.studies.ranking import ranker_sweep
from benchmarks.pipeline.studies.sweeps import sweep

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
PARTS = ("cases", "paper", "sweeps", "ranking")
QUICK_STEPS = 2


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure as the arguments say; what is not measured anew keeps its rows, and what was is kept at once."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    runs, pictures = [], options.results.parent / "pipeline"
    for run in _played(options, _chosen(options)):
        runs.append(run)
        _keep(options, [row_of(run.case, run.recording, time_scale=run.time_scale, kind="wall_clock")])
        write_gantt(pictures, run)
    seeds = 2 if options.quick else 6
    parts: dict[str, Callable[[], list[Row]]] = {
        "paper": lambda: compare(seeds),
        "sweeps": lambda: sweep(seeds, options.seed),
        "ranking": lambda: ranker_sweep(seeds, options.seed),
    }
    for name, computed in parts.items():
        if _wants(options, name):
            rows = computed()
            print(f"{name}: {len(rows)} figures", flush=True)
            _keep(options, rows)
    rows = read_rows(options.results)
    write_overviews(pictures, runs)
    write_plots(pictures, rows)
    write_tables(options.readme, rows, facts(options, time.monotonic() - began), sorted(pictures.glob("*.png")))
    return rows


def _keep(options: argparse.Namespace, new: list[Row]) -> None:
    """Put new rows into the file; ratios of the runs follow from all that are there."""
    rows = merged(read_rows(options.results), new)
    measured = [row for row in rows if row["kind"] == "wall_clock" and row["mode"] != "generation_alone"]
    write_rows(options.results, merged(rows, with_ratios(measured, CASES)))


def _parser() -> argparse.ArgumentParser:
    names = ", ".join([*(case.name for case in CASES), *PARTS[1:]])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"beginnings of names, or 'cases'; of {names}")
    parser.add_argument("--steps", type=int, help="measured steps of each run, in place of its own number")
    parser.add_argument("--time-scale", type=float, default=15.0, help="emulated seconds in one of the wall clock")
    parser.add_argument("--quick", action="store_true", help="two measured steps a run, two seeds a computed figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS / "pipeline.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    return parser


def _chosen(options: argparse.Namespace) -> list[Case]:
    steps = options.steps or (QUICK_STEPS if options.quick else None)
    wanted = [case for case in CASES if _wants(options, case.name) or "cases" in (options.only or [])]
    return [replace(case, steps=steps) if steps else case for case in wanted]


def _wants(options: argparse.Namespace, name: str) -> bool:
    return options.only is None or any(name.startswith(beginning) for beginning in options.only)


def _played(options: argparse.Namespace, cases: list[Case]) -> Iterator[Run]:
    if not cases:
        return
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder,
        stage(Path(folder), options.time_scale, options.seed) as place,
    ):
        for number, case in enumerate(cases, start=1):
            run = place.play(case)
            row = row_of(case, run.recording, time_scale=run.time_scale, kind="wall_clock")
            print(
                f"{number}/{len(cases)} {case.name}: {row['trajectories_per_s']:.2f} trajectories/s, step "
                f"{row['step_s']:.0f} s ({row['ratio_to_ideal']:.0%} of the ideal {row['ideal_step_s']:.0f} s), slots "
                f"{row['slots_busy']:.0%} busy, trainer {row['trainer_busy']:.0%}; took {run.seconds:.0f} s",
                flush=True,
            )
            yield run


if __name__ == "__main__":
    main()
