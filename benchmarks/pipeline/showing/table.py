"""The tables in the README, between their markers, from the rows of ``pipeline.json``."""

import argparse
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.pipeline.cases import SLOWED
from benchmarks.pipeline.results import Row
from bus.embedded.jars import KAFKA_VERSION

BEGIN, END = "<!-- pipeline: begin, written by `make bench-pipeline` -->", "<!-- pipeline: end -->"
WALL_CLOCK = (
    "| workload | mode | dispatch | ranker | trajectories/s | × synchronous | ceiling | of the ceiling | of the ideal "
    "| slots busy | trainer busy | staleness, max |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)
PAPER = (
    "| instances × slots | ranker (recall of the longest 20/10/5 %) | dispatch | generation time, random placement = 1 "
    "| lowest–highest | published |\n|---|---|---|---:|---:|---:|"
)


def write_tables(readme: Path, rows: list[Row], facts: Iterable[str], pictures: Iterable[Path]) -> None:
    """Replace what stands between the markers."""
    parts = [
        "### Wall-clock",
        _table(WALL_CLOCK, (_wall_clock(row) for row in rows if row["kind"] == "wall_clock")),
        *_gains(rows),
        *(f"![{path.stem}]({os.path.relpath(path, readme.parent)})" for path in pictures),
        "### The paper's histogram and decode curve (virtual time)",
        _table(PAPER, (_paper(row) for row in rows if row["workload"].startswith("streamrl"))),
        "\n".join(f"- {fact}" for fact in facts),
    ]
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + "\n\n".join([BEGIN, *parts, END]) + rest.partition(END)[2])


def facts(options: argparse.Namespace, seconds: float) -> list[str]:
    """Where and how the figures came about."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else "unknown CPU"
    return [
        f"Hardware: {cpu}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, shared by broker and all processes; load "
        f"average over the last minute at the end {os.getloadavg()[0]:.1f}.",
        f"Versions: Python {platform.python_version()}, Apache Kafka {KAFKA_VERSION} (one node), aiokafka "
        f"{version('aiokafka')}, numpy {version('numpy')}.",
        f"Time scale {options.time_scale:g}, and {options.time_scale / SLOWED:g} with a ranker that learns: so many "
        f"emulated seconds in one of the wall clock. Seed {options.seed}; {seconds:.0f} s in all, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
    ]


def _table(head: str, lines: Iterable[str]) -> str:
    return "\n".join([head, *lines])


def _wall_clock(row: Row) -> str:
    cells = [row["workload"], row["mode"], row["dispatch"], row["ranker"], f"{row['trajectories_per_s']:.2f}"]
    cells += [_number(row.get(name), ".2f") for name in ("ratio_to_synchronous", "bound")]
    cells += [
        _number(row.get(name), ".0%") for name in ("ratio_to_bound", "ratio_to_ideal", "slots_busy", "trainer_busy")
    ]
    cells.append(_number(row.get("staleness"), ".0f"))
    return f"| {' | '.join(cells)} |"


def _paper(row: Row) -> str:
    recalls = "/".join(f"{value:.2f}" for value in row["recalls"])
    low, high = row["share_range"]
    return (
        f"| {row['workload'].partition('/')[2].replace('x', ' × ')} | {row['ranker']} ({recalls}) | {row['dispatch']} "
        f"| {row['share_of_random']:.3f} | {low:.3f}–{high:.3f} | {row['published_share']:.2f} |"
    )


def _gains(rows: list[Row]) -> list[str]:
    """How much the learned ranker gains, as shares of what perfect knowledge gained here and of the ceilings' gain."""
    known = {(row["workload"], row["mode"], row["ranker"]): row for row in rows if row["kind"] == "wall_clock"}
    told = []
    for (workload, mode, ranker), row in known.items():
        base, best = known.get((workload, mode, "none")), known.get((workload, mode, "perfect"))
        if ranker != "learned" or best is None or (base is None and mode != "generation_alone"):
            continue
        rate, least = row["ratio_to_synchronous"], base["ratio_to_synchronous"] if base else 1.0
        shares = [
            f"{(rate - least) / (best['ratio_to_synchronous'] - least):.0%} of what perfect knowledge gained here"
        ]
        if row["bound"] is not None:
            low = base["bound"] if base else 1.0
            shares.append(f"{(rate - low) / (row['bound'] - low):.0%} of the gain between the ceilings")
        told.append(f"- {workload}, `{mode}`: the learned ranker has {', and '.join(shares)}.")
    return ["\n".join(told)] if told else []


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
