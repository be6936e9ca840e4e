"""Writes the table between the markers of the README."""

import argparse
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- packing: begin, written by `python -m benchmarks.packing` -->", "<!-- packing: end -->"
HEAD = (
    "| workload | token budget | micro-batches | lookahead | padding, mean (worst) | micro-batches | mean tokens "
    "| padding and launches, over the useful cost | ranks wait, 8 as they come | 8 dealt | µs a sample |",
    "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def write_readme(readme: Path, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Replace what stands between the markers."""
    lines = [*HEAD, *(_line(row) for row in rows), "", *_facts(options)]
    head, rest = readme.read_text().split(BEGIN, 1)
    readme.write_text("\n".join([f"{head}{BEGIN}", "", *lines, "", f"{END}{rest.split(END, 1)[1]}"]))


def _line(row: dict[str, Any]) -> str:
    lookahead = f"{row['lookahead']:g}" if row["lookahead"] is not None else ""
    return (
        f"| {row['workload']} | {row['token_budget']:,} | {row['way']} | {lookahead} "
        f"| {row['padding']:.1%} ({row['padding_worst']:.1%}) | {row['micro_batches']} | {row['mean_fill_tokens']:,} "
        f"| {row['cost_over_useful']:.1%} | {row['waiting_8_as_they_come']:.1%} | {row['waiting_8_dealt']:.1%} "
        f"| {row['us_per_sample']:.0f} |"
    )


def _facts(options: argparse.Namespace) -> list[str]:
    return [
        f"- {os.cpu_count()} cores, Python {platform.python_version()}, one thread; load average over the last minute "
        f"at the end {os.getloadavg()[0]:.1f}; {datetime.now(UTC):%Y-%m-%d}. Times are of the processor, with padding "
        "into arrays.",
        f"- {options.orders} random orders of arrival of the same trajectories; all other columns are of the first.",
    ]
