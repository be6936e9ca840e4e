"""What the comparison leaves behind: the tables between the markers of the README, and where they came about."""

import argparse
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- lengths: begin, written by `python -m benchmarks.lengths` -->", "<!-- lengths: end -->"
WORKLOADS = ("synthetic", "answers", "mixed", "lognormal")
ORDER = ("constant", "per_dataset", "observed_quantiles", "learned", "language_model", "perfect")


def environment(options: argparse.Namespace, seconds: float) -> list[str]:
    """Where and how the figures came about, as sentences."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("lightgbm", "numpy", "reasoning-gym", "torch", "transformers")
    )
    return [
        f"Hardware: {_cpu()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB; one thread; load average over the last "
        f"minute at the end {os.getloadavg()[0]:.1f}.",
        f"Versions: Python {platform.python_version()}, {packages}.",
        f"Seed {options.seed}; {options.taught} prompts taught, "
        f"{options.held_out} held out, 8 completions each (1 of `lognormal`); "
        f"{options.epochs:g} passes of the language model; {seconds:.0f} s in all, {datetime.now(UTC):%Y-%m-%d}.",
    ]


def write_readme(readme: Path, rows: Sequence[dict[str, Any]], facts: Sequence[str]) -> None:
    """Replace what stands between the markers."""
    lines = []
    for workload in WORKLOADS:
        chosen = [row for row in rows if row["workload"] == workload]
        lines += [f"### `{workload}`, all data sets", "", *_overall(chosen), ""]
        if len({row["dataset"] for row in chosen}) > 2:
            lines += [f"### `{workload}`, by data set, held out", "", *_by_dataset(chosen), ""]
    lines += [f"- {fact}" for fact in facts]
    text = readme.read_text() if readme.exists() else f"{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    readme.write_text("\n".join([f"{head}{BEGIN}", "", *lines, "", f"{END}{rest.split(END, 1)[1]}"]))


def _overall(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| prompts | predictor | recall@20 %, prompts | @10 % | @5 % | recall@20 %, samples | Kendall τ "
        "| coverage of p90 | µs a prompt, p50 / p99 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted((row for row in rows if row["dataset"] == "all"), key=_rank(rows)):
        lines.append(
            f"| {row['situation']} | {row['predictor']} | {row['recall_prompts']:.3f} "
            f"| {row['recall_prompts_10']:.3f} | {row['recall_prompts_5']:.3f} | {row['recall_samples']:.3f} "
            f"| {row['tau']:.3f} | {_share(row['coverage'])} "
            f"| {row['us_per_prompt_p50']:,.0f} / {row['us_per_prompt_p99']:,.0f} |"
        )
    return lines


def _rank(rows: Sequence[dict[str, Any]]) -> Any:
    situations = list(dict.fromkeys(row["situation"] for row in rows))
    return lambda row: (situations.index(row["situation"]), ORDER.index(row["predictor"]))


def _by_dataset(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Recall, tau and coverage of the fitted ones beside those of the best baseline and of what can be known."""
    held_out = {(row["dataset"], row["predictor"]): row for row in rows if row["situation"] == "held out"}
    lines = [
        "| data set | prompts | recall: learned | language model | observed quantiles | perfect | τ: learned "
        "| language model | observed quantiles | perfect | coverage: learned | language model | per data set |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for dataset in sorted({name for name, _ in held_out} - {"all"}):
        learned, language, observed, perfect, level = (
            held_out[dataset, name]
            for name in ("learned", "language_model", "observed_quantiles", "perfect", "per_dataset")
        )
        cells = [f"{row['recall_prompts']:.2f}" for row in (learned, language, observed, perfect)]
        cells += [f"{row['tau']:.2f}" for row in (learned, language, observed, perfect)]
        cells += [_share(row["coverage"]) for row in (learned, language, level)]
        lines.append(f"| {dataset} | {learned['prompts']} | {' | '.join(cells)} |")
    return lines


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
