"""Pictures: the sweeps, and how full each worker of a measured run was."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pipeline.cases import TIME_SCALE
from benchmarks.pipeline.recording import Span, occupancy
from benchmarks.pipeline.running import Run

Row = dict[str, Any]
LINES = {
    ("stream", "round_robin"): ("stream, round robin", "#8a8778", "--"),
    ("stream", "skewness_aware"): ("stream, skewness-aware", "#8a8778", "-"),
    ("one_step_async", "round_robin"): ("one_step_async, round robin", "#b5482a", "--"),
    ("one_step_async", "skewness_aware"): ("one_step_async, skewness-aware", "#b5482a", "-"),
    ("trajectory_async", "skewness_aware"): ("trajectory_async, skewness-aware", "#1f6f54", "-"),
}
SWEEPS = {
    "p99_over_median": "p99 ÷ median of the lengths",
    "workers": "workers",
    "train_over_generate": "training ÷ generation, per token",
}


def write_sweeps(folder: Path, rows: list[Row]) -> None:
    """The picture of the sweeps, if they are among the rows."""
    # The workload with a training ratio of 1 is the one with the middle skew, under another name.
    swept = [row for row in rows if row["workload"].startswith("sweep/")]
    if not swept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    plt = pyplot()
    figure, panels = plt.subplots(1, len(SWEEPS), figsize=(11, 3.3), layout="constrained")
    for axes, (name, label) in zip(panels, SWEEPS.items(), strict=True):
        _lines(axes, [row for row in swept if row["workload"].startswith(f"sweep/{name}=")], label)
    panels[0].set_ylabel("tokens/s, synchronous round robin = 1", fontsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7.5, frameon=False
    )
    figure.savefig(folder / "sweeps.png", dpi=100)
    plt.close(figure)


def _lines(axes: Any, rows: list[Row], label: str) -> None:
    for (mode, dispatch), (name, colour, style) in LINES.items():
        found = [row for row in rows if (row["mode"], row["dispatch"]) == (mode, dispatch)]
        points = sorted((float(row["workload"].rpartition("=")[2]), row["ratio_to_synchronous"]) for row in found)
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=3, label=name)
    values = sorted({float(row["workload"].rpartition("=")[2]) for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)


COLOURS = {
    "wait_for_batch": "#e9e4d8",
    "forward_backward": "#1f6f54",
    "optimizer": "#b5482a",
    "broadcast_weights": "#d9a441",
    "announce": "#7d6aa8",
    "digests": "#7d6aa8",
    "save_ckpt": "#444444",
}
NAMES = {
    "wait_for_batch": "waits",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "broadcast_weights": "export",
    "announce": "announce",
}
BINS = 700
SHOWN_STEPS = 2.1
"""In a picture."""


def _draw(axes: Any, run: Run, began: float, seconds: float) -> Any:
    """Draw ``seconds`` emulated seconds from the wall-clock moment ``began`` into matplotlib axes; the heat strip."""
    slots, scale = run.case.workload.slots, TIME_SCALE
    busy = occupancy(run.recording, began, began + seconds / scale, bins=BINS, slots=slots)
    grid = np.array([busy[worker] for worker in sorted(busy, key=_number)])
    count = len(grid)
    extent = (0, seconds, count - 0.5, -0.5)
    image = axes.imshow(grid, aspect="auto", cmap="YlGnBu", vmin=0, vmax=slots, extent=extent, interpolation="nearest")
    _trainer(axes, run.spans, began, seconds, scale, count)
    for report in run.recording.reports:
        at = (report.sent_at - began) * scale
        if 0 <= at <= seconds:
            axes.axvline(at, color="#c0392b", linewidth=1.1, linestyle=(0, (4, 2)))
    names = [*(f"worker {number}" for number in range(count)), "trainer"]
    axes.set_yticks([*range(count), count + 0.25], names, fontsize=7)
    axes.set_ylim(count + 0.9, -0.5)
    axes.set_xlim(0, seconds)
    axes.tick_params(axis="x", labelsize=7)
    return image


def _trainer(axes: Any, spans: list[Span], began: float, seconds: float, scale: float, row: int) -> None:
    for name, colour in COLOURS.items():
        bars = [
            (max(0.0, (span.start - began) * scale), min(seconds, (span.end - began) * scale))
            for span in spans
            if span.name == name
        ]
        shown = [(left, right - left) for left, right in bars if right > left]
        axes.broken_barh(shown, (row - 0.3, 1.1), facecolors=colour, linewidth=0)


def write_gantt(folder: Path, run: Run) -> None:
    """A picture of a measured run."""
    folder.mkdir(parents=True, exist_ok=True)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(10, 2.9), layout="constrained")
    began = run.recording.reports[run.case.warm_up].sent_at
    image = _draw(axes, run, began, min(SHOWN_STEPS, run.case.steps) * _step_s(run))
    axes.set_title(f"{run.case.mode}, {run.case.dispatch}, lengths: {run.case.lengths}", fontsize=8, loc="left", pad=3)
    axes.set_xlabel("emulated seconds after the warm-up", fontsize=8)
    _legend(figure, image)
    figure.savefig(folder / f"{run.case.name}.png", dpi=90)
    plt.close(figure)


def _step_s(run: Run) -> float:
    reports = run.recording.reports[run.case.warm_up :]
    return (reports[-1].sent_at - reports[0].sent_at) * TIME_SCALE / (len(reports) - 1)


def _legend(figure: Any, image: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLOURS[name], label=f"trainer: {shown}") for name, shown in NAMES.items()]
    handles.append(Line2D([], [], color="#c0392b", linestyle="--", label="optimizer step reported"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=6.5, frameon=False)
    bar = figure.colorbar(image, ax=figure.axes, pad=0.01, fraction=0.03, aspect=25)
    bar.set_label("running completions", fontsize=7)
    bar.ax.tick_params(labelsize=7)


def _number(worker: str) -> tuple[int, str]:
    digits = worker.rpartition("-")[2]
    return (int(digits), worker) if digits.isdecimal() else (0, worker)


def pyplot() -> Any:
    """Matplotlib without a display."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
