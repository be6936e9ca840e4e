"""The rows as a picture: predicted against published, the fitted rows and the ones that were not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation.summary import is_throughput

COLOURS = {
    "verl": "tab:gray",
    "colocation": "tab:brown",
    "one_step": "tab:orange",
    "stream": "tab:olive",
    "sync": "tab:olive",
    "areal": "tab:blue",
    "async": "tab:green",
    "laminar": "tab:green",
}
FAR = 1.3


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Throughputs of both papers, each with the band of ± 30 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, (paper, unit) in zip(axes, (("laminar", "thousand tokens/s"), ("streamrl", "samples/s")), strict=True):
        mine = [row for row in rows if row["paper"] == paper and is_throughput(row)]
        for system in dict.fromkeys(row["system"] for row in mine):
            points = [row for row in mine if row["system"] == system]
            axis.scatter(
                [row["published"] for row in points],
                [row["predicted"] for row in points],
                s=18,
                color=COLOURS[system],
                label=system,
            )
        if mine:
            ends = [min(row["published"] for row in mine) / FAR, max(row["published"] for row in mine) * FAR]
            axis.plot(ends, ends, color="black", linewidth=0.8)
            axis.fill_between(ends, [end / FAR for end in ends], [end * FAR for end in ends], alpha=0.12, color="black")
            axis.legend(fontsize=8)
        axis.set(xscale="log", yscale="log", xlabel=f"published, {unit}", ylabel="predicted", title=paper)
    figure.savefig(path, dpi=110)
    plt.close(figure)
