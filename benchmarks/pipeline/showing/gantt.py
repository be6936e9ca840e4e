"""A run as a picture: how full each worker was, what the trainer did, and where the steps end."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pipeline.cases import slug
from benchmarks.pipeline.running.figures import occupancy
from benchmarks.pipeline.running.spans import Span
from benchmarks.pipeline.running.wall_clock import Run

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
"""Of the slowest run of a workload."""


def _draw(axes: Any, run: Run, began: float, seconds: float) -> Any:
    """Draw ``seconds`` emulated seconds from the wall-clock moment ``began`` into matplotlib axes; the heat strip."""
    slots, scale = run.case.workload.slots, run.time_scale
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
    """A picture of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{run.case.name}.png", [run], min(SHOWN_STEPS, run.case.steps) * _step_s(run))


def write_overviews(folder: Path, runs: list[Run]) -> None:
    """A picture of all runs of a workload on one time axis, if the run that they are compared with is among them."""
    for workload in dict.fromkeys(run.case.workload.name for run in runs):
        own = [run for run in runs if run.case.workload.name == workload]
        seconds = max(min(SHOWN_STEPS, run.case.steps) * _step_s(run) for run in own)
        if len(own) > 1 and ("synchronous", "round_robin") in {(run.case.mode, run.case.dispatch) for run in own}:
            _write(folder / f"{slug(workload)}-overview.png", own, seconds)


def _step_s(run: Run) -> float:
    reports = run.recording.reports[run.case.warm_up :]
    return (reports[-1].sent_at - reports[0].sent_at) * run.time_scale / (len(reports) - 1)


def _write(target: Path, runs: list[Run], seconds: float) -> None:
    plt = pyplot()
    height = 2.9 if len(runs) == 1 else 1.75 * len(runs) + 0.6
    figure, panels = plt.subplots(len(runs), 1, figsize=(10, height), layout="constrained", squeeze=False)
    image = None
    for axes, run in zip(panels[:, 0], runs, strict=True):
        began = run.recording.reports[run.case.warm_up].sent_at
        image = _draw(axes, run, began, seconds)
        ranker = "" if run.case.ranker == "none" else f", ranker {run.case.ranker}"
        axes.set_title(f"{run.case.mode}, {run.case.dispatch}{ranker}", fontsize=8, loc="left", pad=3)
    panels[-1, 0].set_xlabel("emulated seconds after the warm-up", fontsize=8)
    _legend(figure, image)
    figure.savefig(target, dpi=90)
    plt.close(figure)


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
