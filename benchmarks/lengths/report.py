"""What the comparison leaves behind: the tables between the markers of the README, and where they came about."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- lengths: begin, written by `python -m benchmarks.lengths` -->", "<!-- lengths: end -->"
ORDER = (
    *("chance", "data_set", "observed_quantiles", "learned", "language_model", "language_model_smollm2", "perfect"),
)
DETAILED = (("synthetic", "seen"), ("real", "real"))
"""Workload and split whose data sets are told one by one."""


def facts_of(options: argparse.Namespace, where: Mapping[str, Any]) -> list[str]:
    """Where and how the figures came about, as sentences."""
    return [
        f"Hardware: {where['hardware']}; one thread; load average over the last minute at the end {where['load']}.",
        f"Versions: {where['versions']}.",
        f"Seed {where['seed']}; {options.prompts} prompts drawn, equal ones counted once; {options.epochs:g} passes of "
        f"the language model; {where['seconds']} s in all, {where['date']}.",
    ]


def write_readme(readme: Path, rows: Sequence[dict[str, Any]], facts: Sequence[str]) -> None:
    """Replace what stands between the markers."""
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        chosen = [row for row in rows if row["workload"] == workload]
        lines += [f"### `{workload}`, lengths {chosen[0]['lengths']}", "", *_overall(chosen), ""]
        for _, split in (detail for detail in DETAILED if detail[0] == workload):
            lines += [f"### `{workload}`, by data set", "", *_by_dataset(chosen, split), ""]
    lines += [f"- {fact}" for fact in facts]
    text = readme.read_text() if readme.exists() else f"{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    readme.write_text("\n".join([f"{head}{BEGIN}", "", *lines, "", f"{END}{rest.split(END, 1)[1]}"]))


def _overall(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| split | taught | asked | overlap | predictor | recall@20 %, prompts | within a data set | @10 % | @5 % "
        "| recall@20 %, samples | Kendall τ | coverage of p90 | µs a prompt, p50 / p99 |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    whole = [row for row in rows if row["dataset"] == "all"]
    splits = list(dict.fromkeys(row["split"] for row in whole))
    for row in sorted(whole, key=lambda row: (splits.index(row["split"]), ORDER.index(row["predictor"]))):
        lines.append(
            f"| {row['split']} | {row['taught']} | {row['prompts']} | {row['overlap']} | {row['predictor']} "
            f"| {row['recall']:.3f} | {_share(row['within_data_set_recall'])} "
            f"| {row['recall_10']:.3f} | {row['recall_5']:.3f} | {row['recall_samples']:.3f} "
            f"| {row['tau']:.3f} | {_share(row['coverage'])} "
            f"| {row['us_per_prompt_p50']:,.0f} / {row['us_per_prompt_p99']:,.0f} |"
        )
    return lines


def _by_dataset(rows: Sequence[dict[str, Any]], split: str) -> list[str]:
    """Recall and tau of the fitted ones beside those of the best baseline and of what can be known."""
    held_out = {(row["dataset"], row["predictor"]): row for row in rows if row["split"] == split}
    compared = ("learned", "language_model", "observed_quantiles", "perfect")
    titles = " | ".join(f"{measure}{name}" for measure in ("recall: ", "τ: ") for name in compared)
    lines = [f"| data set | asked | {titles} |", "|---|---:|" + "---:|" * 8]
    for dataset in sorted({name for name, _ in held_out} - {"all"}):
        chosen = [held_out[dataset, name] for name in compared]
        cells = [f"{row[measure]:.2f}" for measure in ("recall", "tau") for row in chosen]
        lines.append(f"| {dataset} | {chosen[0]['prompts']} | {' | '.join(cells)} |")
    return lines


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
