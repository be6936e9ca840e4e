"""What the comparison leaves behind: figures as JSON rows, the picture, and the table between the README's markers."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.peers.contenders.plan import Trained
from benchmarks.peers.judging.curves import Curve, common_target, ratio, seconds_to, smoothed, steps_to
from benchmarks.peers.judging.judge import Judged

BEGIN, END = "<!-- peers {task}: begin, written by `make bench-peers` -->", "<!-- peers {task}: end -->"
CONFIDENCE = 0.95
SHARES = (0.5, 0.75, 0.9)
"""Targets, as shares of the gain that every contender reaches; the last one is the one that counts."""
PEER = "TRL"
"""How the names of the peer's contenders begin."""


@dataclass(frozen=True)
class Reached:
    """What a run had spent when its curve reached the target; None: it never did.

    ``tokens``: completion tokens sampled, and those that went through the trainer. ``cpu_s``: the run's processor time,
    start included, by the share of its steps.
    """

    seconds: float | None
    steps: float | None = None
    samples: float | None = None
    tokens: float | None = None
    cpu_s: float | None = None


def figures(task: str, rounds: Sequence[Sequence[Judged]]) -> list[dict[str, Any]]:
    """One row for each contender and target: what it took by seed, and the ratio to the peer's fastest way.

    ``seconds_ci``: the 95 % confidence interval of that ratio, by Student's t over the logarithms of the seeds' pairs.
    """
    rows = []
    for share in SHARES:
        reached: dict[str, list[Reached]] = {}
        for judged in rounds:
            curves = {one.trained.contender: smoothed(one.curve) for one in judged}
            target = common_target(list(curves.values()), share)
            for one in judged:
                name = one.trained.contender
                reached.setdefault(name, []).append(_spent(one.trained, curves[name], target))
        peers = [[one.seconds for one in runs] for name, runs in reached.items() if name.startswith(PEER)]
        # By all seeds together: the peer's best settings are settings, and not the luck of each seed.
        whole = ([seconds for seconds in times if seconds] for times in peers if all(times))
        peer = min(whole, key=geometric_mean, default=[])
        for name, runs in reached.items():
            seconds = [one.seconds for one in runs]
            rows.append(
                {
                    "task": task,
                    "contender": name,
                    "share_of_gain": share,
                    "seconds": [_rounded(second, 1) for second in seconds],
                    "steps": [_rounded(one.steps, 1) for one in runs],
                    "samples": [_rounded(one.samples, 0) for one in runs],
                    "tokens_computed": [_rounded(one.tokens, 0) for one in runs],
                    "cpu_s": [_rounded(one.cpu_s, 1) for one in runs],
                    "ratio_to_trl": _rounded(ratio(seconds, peer), 3) if peer else None,
                    "seconds_ci": _interval(seconds, peer),
                }
            )
    return rows


def _spent(trained: Trained, curve: Curve, target: float) -> Reached:
    steps = steps_to(curve, target)
    if steps is None:
        return Reached(None)
    done = [row for row in trained.steps if row["step"] <= steps + 1]
    # The step under way counts by the part of it before the target.
    parts = [min(1.0, steps - row["step"] + 1) for row in done]
    samples, sampled, computed = (
        sum(part * row.get(name, 0.0) for part, row in zip(parts, done, strict=True))
        for name in ("samples", "sampled_tokens", "trained_tokens")
    )
    whole = max((row["step"] for row in trained.steps), default=0)
    cpu_s = trained.cpu_seconds * steps / whole if whole else None
    return Reached(seconds_to(curve, target), steps, samples, sampled + computed, cpu_s)


def _interval(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float] | None:
    from scipy.stats import ttest_1samp

    logs = [math.log(one / other) for one, other in zip(mine, theirs, strict=False) if one and other]
    if len(logs) < max(len(mine), 2):
        return None
    if max(logs) - min(logs) < 1e-12:
        return [round(math.exp(logs[0]), 3)] * 2
    found = ttest_1samp(logs, 0.0).confidence_interval(CONFIDENCE)
    return [round(math.exp(found.low), 3), round(math.exp(found.high), 3)]


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


def write_readme(readme: Path, task: str, rows: Sequence[dict[str, Any]], facts: Sequence[str]) -> None:
    """Replace what stands between the markers."""
    lines = [
        "| contender | s to half of the gain | to 75 % | **to 90 %** | steps to 90 % "
        "| **s, TRL's fastest = 1** | 95 % interval |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = {row["share_of_gain"]: row for row in rows if row["contender"] == name}
        last = own[SHARES[-1]]
        cells = [
            name,
            *(_range(own[share]["seconds"]) for share in SHARES),
            _range(last["steps"]),
            _or_dash(last["ratio_to_trl"]),
            _between(last["seconds_ci"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"![Learning curves](../results/peers-{task}.png)", "", *(f"- {fact}" for fact in facts)]
    begin, end = BEGIN.format(task=task), END.format(task=task)
    head, rest = readme.read_text().split(begin, 1)
    readme.write_text("\n".join([f"{head}{begin}", "", *lines, "", f"{end}{rest.split(end, 1)[1]}"]))


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


def _between(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
