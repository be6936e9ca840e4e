"""What a measurement leaves behind: the table and its surroundings in the README, and the plot."""

import argparse
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.transport.servers import redis_server
from bus.embedded.jars import KAFKA_VERSION

BEGIN, END = "<!-- transport: begin, written by `make bench-transport` -->", "<!-- transport: end -->"
PACKAGES = ("aiokafka", "uvloop", "msgpack", "pydantic", "numpy", "redis", "orjson")
COLOURS = {"kafka": "#1f6f54", "redis": "#b5482a", "files": "#8a8778"}
NAMES = {"kafka": "Kafka, typed frames (ours)", "redis": "Redis stream, pickled lists", "files": "JSON lines in files"}


def environment(options: argparse.Namespace, seconds: float) -> list[str]:
    """Where and how the figures came about, as sentences."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return [
        f"Hardware: {_cpu()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB; load average over the last minute at the "
        f"end {os.getloadavg()[0]:.1f}. All processes, brokers included, share these cores.",
        f"Versions: Python {platform.python_version()}, Apache Kafka {KAFKA_VERSION} (one node), {_redis()}, "
        f"{packages}.",
        f"Seed {options.seed}; {options.count} trajectories at full speed and {options.paced_count} at "
        f"{options.rate:g}/s per round, at most {options.repetitions} interleaved repetitions, {seconds:.0f} s in all, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
    ]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _redis() -> str:
    executable = redis_server()
    if executable is None:
        return "no redis-server"
    words = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout.split()
    return "Redis " + next(word.removeprefix("v=") for word in words if word.startswith("v="))


def write_table(readme: Path, rows: list[dict[str, Any]], facts: list[str], plot: Path) -> None:
    """Replace what stands between the markers."""
    ours = {row["tokens"]: row["trajectories_per_s"] for row in rows if row["path"] == "kafka"}
    lines = [
        "| tokens | path | trajectories/s, median (lowest–highest, rounds) | ours is | p50, ms | p99, ms |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["trajectories_per_s_range"]
        faster = ours[row["tokens"]] / row["trajectories_per_s"] if row["tokens"] in ours else None
        ratio = "" if row["path"] == "kafka" or faster is None else f"{faster:.1f}× faster"
        lines.append(
            f"| {row['tokens']:,} | {NAMES[row['path']]} | {row['trajectories_per_s']:,.0f} ({low:,.0f}–{high:,.0f}, "
            f"{row['repetitions']}) "
            f"| {ratio} | {row['p50_ms']:,.1f} | {row['p99_ms']:,.1f} |"
        )
    link = os.path.relpath(plot, readme.parent)
    block = [BEGIN, "", *lines, "", f"![Rates and latencies of the three paths]({link})", ""]
    block += [f"- {fact}" for fact in facts] + ["", END]
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + "\n".join(block) + rest.partition(END)[2])


def write_plot(target: Path, rows: list[dict[str, Any]]) -> None:
    """Rates and latencies by size, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rates, latencies) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for path in dict.fromkeys(row["path"] for row in rows):
        own = [row for row in rows if row["path"] == path]
        sizes = [row["tokens"] for row in own]
        medians = [row["trajectories_per_s"] for row in own]
        low_high = [
            [median - row["trajectories_per_s_range"][0] for median, row in zip(medians, own, strict=True)],
            [row["trajectories_per_s_range"][1] - median for median, row in zip(medians, own, strict=True)],
        ]
        style = {"color": COLOURS[path], "marker": "o", "label": NAMES[path]}
        rates.errorbar(sizes, medians, yerr=low_high, capsize=3, **style)
        latencies.plot(sizes, [row["p50_ms"] for row in own], **style)
        latencies.fill_between(
            sizes, [row["p50_ms"] for row in own], [row["p99_ms"] for row in own], color=COLOURS[path], alpha=0.15
        )
    rates.set(title="Full speed", ylabel="trajectories/s")
    latencies.set(title="Paced: trajectory → micro-batch (p50 to p99)", ylabel="ms")
    for axes in (rates, latencies):
        axes.set(xscale="log", yscale="log", xlabel="tokens per trajectory")
        axes.grid(alpha=0.25)
    rates.legend(frameon=False)
    figure.savefig(target, dpi=130)
    plt.close(figure)
