"""What the comparison leaves behind: figures as JSON rows, the picture, and the table between the README's markers."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.peers.judging.curves import common_target, ratio, seconds_to, smoothed, steps_to
from benchmarks.peers.judging.judge import Judged

BEGIN, END = "<!-- peers: begin, written by `make bench-peers` -->", "<!-- peers: end -->"
SHARES = (0.5, 0.75, 0.9)
"""Targets, as shares of the gain that every contender reaches; the last one is the one that counts."""
PEER = "TRL"
"""How the names of the peer's contenders begin."""


def figures(rounds: Sequence[Sequence[Judged]]) -> list[dict[str, Any]]:
    """One row for each contender and target: seconds and steps by seed, and the ratio to the peer's fastest way."""
    rows = []
    for share in SHARES:
        reached: dict[str, list[tuple[float | None, float | None]]] = {}
        for judged in rounds:
            curves = {one.trained.contender: smoothed(one.curve) for one in judged}
            target = common_target(list(curves.values()), share)
            for name, curve in curves.items():
                reached.setdefault(name, []).append((seconds_to(curve, target), steps_to(curve, target)))
        peers = [[seconds for seconds, _ in times] for name, times in reached.items() if name.startswith(PEER)]
        # By all seeds together: the peer's best settings are settings, and not the luck of each seed.
        whole = ([seconds for seconds in times if seconds] for times in peers if all(times))
        peer = min(whole, key=geometric_mean, default=[])
        for name, times in reached.items():
            seconds = [second for second, _ in times]
            rows.append(
                {
                    "contender": name,
                    "share_of_gain": share,
                    "seconds": [_rounded(second, 1) for second in seconds],
                    "steps": [_rounded(step, 1) for _, step in times],
                    "ratio_to_trl": _rounded(ratio(seconds, peer), 3) if peer else None,
                }
            )
    return rows


def parts_of_the_ratio(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the ratio of time at the last target consists of: each factor is a ratio of two contenders' times.

    ``engine``: our synchronous run to the peer's fastest, which do the same in the same order; ``asynchrony``: ours
    asynchronous to ours synchronous; ``zero_advantage``: leaving samples without advantage out, as both of ours do, to
    computing them, both asynchronous.
    """
    times = {row["contender"]: row["seconds"] for row in rows if row["share_of_gain"] == SHARES[-1]}
    ratios = {row["contender"]: row["ratio_to_trl"] for row in rows if row["share_of_gain"] == SHARES[-1]}
    ours, plain = "streamrl trajectory_async", "streamrl synchronous"

    def over(one: str, other: str) -> float | None:
        return _rounded(ratio(times[one], times[other]), 3) if one in times and other in times else None

    return {
        "engine": ratios.get(plain),
        "asynchrony": over(ours, plain),
        "zero_advantage": over(ours, f"{ours}, zero advantages computed"),
    }


def runs(rounds: Sequence[Sequence[Judged]]) -> list[dict[str, Any]]:
    """One row for each run: its learning curve and what its steps were like."""
    return [
        {
            "contender": one.trained.contender,
            "seed": one.trained.seed,
            "finished": one.trained.finished,
            "cpu_seconds": round(one.trained.cpu_seconds, 1),
            "curve": [
                {"step": p.step, "seconds": round(p.seconds, 2), "reward": round(p.reward, 4)} for p in one.curve
            ],
            "parts": {name: [round(value, 3) for value in values] for name, values in one.parts.items()},
            "seconds_to_first_step": _rounded(one.trained.steps[0]["seconds"] if one.trained.steps else None, 2),
            "means": {
                name: round(fmean(step.get(name, 0.0) for step in one.trained.steps), 3)
                for name in sorted({name for step in one.trained.steps for name in step} - {"step", "seconds"})
            },
        }
        for judged in rounds
        for one in judged
    ]


def plot(rounds: Sequence[Sequence[Judged]], target: Path) -> None:
    """Held-out reward over wall-clock and over steps; a line for each run."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.0), layout="constrained")
    over_time, over_steps = figure.subplots(1, 2, sharey=True)
    names = sorted({one.trained.contender for judged in rounds for one in judged})
    colours = {name: colormaps["tab10"](place) for place, name in enumerate(names)}
    for number, judged in enumerate(rounds):
        for one in judged:
            curve, name = smoothed(one.curve), one.trained.contender
            style = {"color": colours[name], "alpha": 0.9, "marker": ".", "label": None if number else name}
            over_time.plot([p.seconds for p in curve], [p.reward for p in curve], **style)
            over_steps.plot([p.step for p in curve], [p.reward for p in curve], **style)
    over_time.set(xlabel="wall-clock since the command's start, s", ylabel="reward on held-out prompts")
    over_steps.set(xlabel="optimizer steps")
    # Below: curves of all seeds fill the axes.
    figure.legend(*over_time.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for axes in (over_time, over_steps):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=110, metadata={"Software": None})


def write_readme(readme: Path, rows: Sequence[dict[str, Any]], facts: Sequence[str]) -> None:
    """Replace what stands between the markers."""
    lines = [
        "| contender | s to half of the gain | to 75 % | **to 90 %** | steps to 90 % | **s, TRL's fastest = 1** |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = {row["share_of_gain"]: row for row in rows if row["contender"] == name}
        times = [_range(own[share]["seconds"]) for share in SHARES]
        last = own[SHARES[-1]]
        lines.append(f"| {name} | {' | '.join(times)} | {_range(last['steps'])} | {_or_dash(last['ratio_to_trl'])} |")
    lines += ["", "![Learning curves](../results/peers.png)", "", *(f"- {fact}" for fact in facts)]
    text = readme.read_text() if readme.exists() else f"{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    readme.write_text("\n".join([f"{head}{BEGIN}", "", *lines, "", f"{END}{rest.split(END, 1)[1]}"]))


def hardware() -> str:
    """Processor, cores and memory of this machine, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, {memory_gib:.0f} GiB"


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "not by every seed"
    return f"{geometric_mean(known):.0f} ({', '.join(f'{value:.0f}' for value in known)})"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
