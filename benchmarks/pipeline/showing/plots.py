"""The sweeps as one picture."""

from pathlib import Path
from typing import Any

from benchmarks.pipeline.results import Row
from benchmarks.pipeline.showing.gantt import pyplot

LINES = {
    ("stream", "round_robin"): ("stream, round robin", "#8a8778", "--"),
    ("stream", "skewness_aware"): ("stream, skewness-aware", "#8a8778", "-"),
    ("one_step_async", "round_robin"): ("one_step_async, round robin", "#b5482a", "--"),
    ("one_step_async", "skewness_aware"): ("one_step_async, skewness-aware", "#b5482a", "-"),
    ("trajectory_async", "any"): ("trajectory_async: all busy", "#1f6f54", "-"),
}
SWEEPS = {
    "p99_over_median": "p99 ÷ median of the lengths",
    "workers": "workers",
    "train_over_generate": "training ÷ generation, per token",
}


def write_plots(folder: Path, rows: list[Row]) -> None:
    """The picture of the sweeps, if they are among the rows."""
    swept = [row for row in rows if row["workload"].startswith("sweep/")]
    if not any(row["kind"] == "virtual" and "=" in row["workload"] for row in swept):
        return
    folder.mkdir(parents=True, exist_ok=True)
    plt = pyplot()
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.3), layout="constrained")
    for axes, (name, label) in zip(panels, SWEEPS.items(), strict=False):
        _lines(axes, [row for row in swept if row["workload"].startswith(f"sweep/{name}=")], label)
    _ranking(panels[3], [row for row in swept if row["workload"] == "sweep/ranker"])
    panels[0].set_ylabel("throughput, synchronous round robin = 1", fontsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7.5, frameon=False
    )
    figure.savefig(folder / "sweeps.png", dpi=100)
    plt.close(figure)


def _lines(axes: Any, rows: list[Row], label: str) -> None:
    for (mode, dispatch), (name, colour, style) in LINES.items():
        found = [row for row in rows if (row["mode"], row["dispatch"]) == (mode, dispatch)]
        points = [_point(row) for row in found if row["kind"] == "virtual"]
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=3, label=name)
        for row in found:
            if row["kind"] == "wall_clock" and row["ratio_to_synchronous"] is not None:
                axes.plot(
                    *_point(row), color=colour, marker="X", markersize=9, markeredgecolor="white", linestyle="none"
                )
    values = sorted({float(row["workload"].rpartition("=")[2]) for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label, fontsize=8)
    _tidy(axes)


def _point(row: Row) -> tuple[float, float]:
    return float(row["workload"].rpartition("=")[2]), row["ratio_to_synchronous"]


def _ranking(axes: Any, rows: list[Row]) -> None:
    points = sorted(
        (row["recall_of_longest_fifth"], row["ratio_to_synchronous"])
        for row in rows
        if row.get("recall_of_longest_fifth") is not None
    )
    if points:
        axes.plot(*zip(*points, strict=True), color="#2c5d8f", marker="o", markersize=3)
    axes.axhline(1.0, color="#8a8778", linestyle="--")
    axes.annotate("round robin", (0.2, 1.0), textcoords="offset points", xytext=(2, 3), fontsize=7)
    axes.set_xlabel("recall of the longest fifth", fontsize=8)
    axes.set_title("generation alone, skewness-aware", fontsize=8)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
