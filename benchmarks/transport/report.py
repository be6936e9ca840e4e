"""The plot of a measurement; the tables in the README are written from ``transport.json`` by ``docs.generate``."""

from pathlib import Path
from typing import Any

COLOURS = {"kafka": "#1f6f54", "redis": "#b5482a", "files": "#8a8778"}
LINES = {"batched": "-", "single": ":", "group": "--"}


def write_plot(target: Path, rows: list[dict[str, Any]]) -> None:
    """Rates and latencies by size, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rates, latencies) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        sizes = [row["tokens"] for row in own]
        medians = [row["trajectories_per_s"] for row in own]
        low_high = [
            [median - row["trajectories_per_s_range"][0] for median, row in zip(medians, own, strict=True)],
            [row["trajectories_per_s_range"][1] - median for median, row in zip(medians, own, strict=True)],
        ]
        style = {"color": COLOURS[own[0]["path"]], "linestyle": LINES[own[0]["batching"]], "marker": "o", "label": name}
        rates.errorbar(sizes, medians, yerr=low_high, capsize=3, **style)
        latencies.plot(sizes, [row["p50_ms"] for row in own], **style)
        latencies.plot(sizes, [row["p99_ms"] for row in own], **style | {"alpha": 0.35})
    rates.set(title="Full speed", ylabel="trajectories/s")
    latencies.set(title="Paced: trajectory → micro-batch (p50, paler p99)", ylabel="ms")
    for axes in (rates, latencies):
        axes.set(xscale="log", yscale="log", xlabel="tokens per trajectory")
        axes.grid(alpha=0.25)
    rates.legend(frameon=False, fontsize=7)
    figure.savefig(target, dpi=130)
    plt.close(figure)
