"""Generation throughput of one run while 0, 1, 2, 4 and 8 instances are attached to it, and leave again.

One run goes on all the time. Instances come one batch after the other until there are 8, and go in the same way, so
that each number is measured on the way up and on the way down, in every sweep, and a drift of the machine falls on all.
A stretch is measured once every instance has taken steps and is no further behind than a batch or two, so the seconds
of processor time in which they start do not count; what was generated is what the workers' heartbeats say.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.algorithms.emulated import GROUPS, SAMPLES, TOKENS_PER_S, WORKLOAD, stream
from benchmarks.algorithms.streams import NEVER, PATIENCE_S, Stream, read_counts
from benchmarks.algorithms.streams import tokens_per_s as rate_of
from benchmarks.spending import cpu_s_of
from streamrl.bus.embedded.cluster import start_cluster

LEVELS = (0, 1, 2, 4, 8)
ALGORITHMS = ("rloo", "ppo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_plus_plus", "grpo")
"""Of the instances, in turn."""
LONGEST_S = 900.0
"""Of all sweeps: a further one is begun only if it is over by then, should it take as long as the longest before."""
SETTLE_S = 2.0
MAX_STALENESS = 16
"""The longest samples take five optimizer steps. Under a bound of 4 workers wait for their own trainer now and then:
without any consumer 15 s differed by a tenth from 15 others; here by some thousandths.
"""
BEHIND = 2 * GROUPS * SAMPLES
"""Samples that an instance which keeps up may have to take yet: of the batch at hand, and of one to come."""
DOES_NOT_SHOW = (
    "generation that shares its processors or devices with trainers: engine and trainers' devices are emulated, so an "
    "instance costs what its process, the broker and the topics cost; a broker at its limit, which a rate of "
    "some 35 completions/s is far from; a staleness bound under which workers wait for their trainer; a network"
)


@dataclass(frozen=True)
class Window:
    """A measured stretch: so many ``consumers`` attached, between two moments in seconds since the epoch.

    ``kept_up``: steps that the instances took in it, as a share of the served trainer's; None of none. ``processors``:
    that the instances kept busy; ``busy``: share of the machine's that anybody did.
    """

    consumers: int
    began: float
    ended: float
    kept_up: float | None
    processors: float
    busy: float


def measured(sweeps: int, window_s: float, seed: int) -> dict[str, Any]:
    """``attached``: rows ``consumers``, ``throughput_ratio``."""
    with tempfile.TemporaryDirectory(prefix="streamrl-attached-") as scratch:
        folder = Path(scratch)
        with start_cluster(folder / "kafka") as cluster:
            address, run = cluster.bootstrap_servers, "served"
            with stream(folder, address, run, "grpo", NEVER, seed, MAX_STALENESS) as served:
                windows = _swept(served, sweeps, window_s)
            counts = read_counts(address, run)
    rates = [(window, rate_of(counts, window.began, window.ended)) for window in windows]
    rows = rows_of(rates)
    for row in rows:
        low, high = row["range"]
        print(
            f"{row['consumers']} attached: {row['throughput_ratio']:.4f} ({low:.4f}-{high:.4f}) of the throughput, "
            f"{row['processors']:.2f} processors for them, {row['busy']:.0%} of the machine busy",
            flush=True,
        )
    return {
        "attached": rows,
        "attached_worst": round(max(abs(row["throughput_ratio"] - 1) for row in rows), 4),
        "conditions": {
            "workload": WORKLOAD,
            "ceiling_tokens_per_s": TOKENS_PER_S,
            "max_staleness": MAX_STALENESS,
            "window_s": window_s,
            "sweeps": len(windows) // (2 * len(LEVELS)),
            "does_not_show": DOES_NOT_SHOW,
        },
    }


def staircase() -> list[int]:
    """Numbers of consumers of one sweep, window by window: up and down again."""
    return [*LEVELS, *reversed(LEVELS)]


def rows_of(rates: Sequence[tuple[Window, float]]) -> list[dict[str, Any]]:
    """One for each number of consumers.

    ``throughput_ratio``: the mean of its windows' rates over the mean of those without consumers; ``range``: its
    lowest and highest window, over the same. That of none says what windows differ by on their own.
    """
    of_level: Mapping[int, list[tuple[Window, float]]] = {
        level: [one for one in rates if one[0].consumers == level] for level in LEVELS
    }
    alone = statistics.fmean(rate for _, rate in of_level[0])
    rows = []
    for level, own in of_level.items():
        found = [rate for _, rate in own]
        kept = [window.kept_up for window, _ in own if window.kept_up is not None]
        rows.append(
            {
                "consumers": level,
                "throughput_ratio": round(statistics.fmean(found) / alone, 4),
                "range": [round(min(found) / alone, 4), round(max(found) / alone, 4)],
                "tokens_per_s": round(statistics.fmean(found), 1),
                "windows": len(found),
                "kept_up": round(statistics.median(kept), 3) if kept else None,
                "processors": round(statistics.median(window.processors for window, _ in own), 3),
                "busy": round(statistics.median(window.busy for window, _ in own), 3),
            }
        )
    return rows


def _swept(served: Stream, sweeps: int, window_s: float) -> list[Window]:
    began, longest_s = time.monotonic(), 0.0
    served.until(lambda: served.step() >= 5, "five steps of the run")
    windows: list[Window] = []
    numbers, algorithms = itertools.count(1), itertools.cycle(ALGORITHMS)
    for sweep in range(sweeps):
        sweep_began = time.monotonic()
        if sweep_began - began + longest_s > LONGEST_S:
            print(f"no time for sweep {sweep + 1} of {sweeps}", flush=True)
            break
        for level in staircase():
            while len(served.attached) < level:
                served.attach(f"instance-{next(numbers)}", next(algorithms), "now")
            served.leave(list(served.attached)[level:])
            patience_s = min(PATIENCE_S, began + LONGEST_S - time.monotonic())
            served.until(lambda: _keep_up(served), f"{level} instances that keep up", patience_s)
            time.sleep(SETTLE_S)
            windows.append(_window(served, window_s))
            print(
                f"sweep {sweep + 1}/{sweeps}, {level} attached, {time.monotonic() - began:.0f} s: "
                f"kept up {windows[-1].kept_up or 1:.2f}, {windows[-1].busy:.0%} of the machine busy",
                flush=True,
            )
        longest_s = max(longest_s, time.monotonic() - sweep_began)
    return windows


def _keep_up(served: Stream) -> bool:
    return all(keeps_up(served.newest(name)) for name in served.attached)


def keeps_up(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an instance with these rows of metrics has taken steps and has little left to read."""
    if len(rows) < 2:
        return False
    lag: float = sum(value for key, value in rows[-1].items() if key.startswith("kafka/lag/"))
    return lag <= BEHIND


def _window(served: Stream, seconds: float) -> Window:
    pids = [process.pid for process in served.attached.values()]
    steps, own, spent = served.step(), _own_steps(served), cpu_s_of(pids)
    psutil.cpu_percent()  # from here on
    began = time.time()
    time.sleep(seconds)
    ended, busy = time.time(), psutil.cpu_percent() / 100
    spent, taken = cpu_s_of(pids) - spent, served.step() - steps
    kept_up = (_own_steps(served) - own) / (taken * len(pids)) if pids and taken else None
    served.check()  # nobody may have gone meanwhile
    return Window(len(pids), began, ended, kept_up, spent / (ended - began), busy)


def _own_steps(served: Stream) -> int:
    return sum(served.step(name) for name in served.attached)
