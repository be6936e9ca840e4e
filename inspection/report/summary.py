"""The run in one JSON object, and in a few lines for the terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inspection.report.figures import ENDS
from observability.run_state.observer import RunState

Summary = dict[str, Any]


def build_summary(
    state: RunState,
    *,
    engine: str,
    seed: int,
    run_seconds: float,
    resumed_from: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
    restarts: int,
) -> Summary:
    """Figures of a run over all starts, but for ``run_seconds``: this start's, from its processes' begin to their end.

    ``resumed_from``: the step of the checkpoint that it went on from, 0 for none. ``step_seconds``: the optimizer steps
    together, which rates are over. Rewards are means of the first and of the last five steps. ``staleness_*`` is in
    optimizer steps, the mean over trained tokens' oldest spans; ``trainer_wait_share`` is the share of step time spent
    waiting for a batch.
    """
    steps = state.steps
    trajectories = sum(point.trajectories for point in steps)
    tokens = sum(point.metrics.get("completions/num_tokens", 0.0) for point in steps)
    waiting = sum(point.metrics.get("time/wait_for_batch", 0.0) for point in steps)
    stepping = sum(point.metrics.get("time/step", 0.0) for point in steps)
    rewards = [point.metrics["reward"] for point in steps if "reward" in point.metrics]
    return {
        "engine": engine,
        "seed": seed,
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        "run_seconds": round(run_seconds, 2),
        "step_seconds": round(stepping, 2),
        "resumed_from": resumed_from,
        "steps": steps[-1].step if steps else 0,
        "trajectories": trajectories,
        "trajectories_per_s": round(trajectories / stepping, 2) if stepping else 0.0,
        "tokens_per_s": round(tokens / stepping, 1) if stepping else 0.0,
        "staleness_mean": round(_weighted_mean(state, "off_policy/mean"), 3),
        "staleness_max": max((point.metrics.get("off_policy/max", 0.0) for point in steps), default=0.0),
        "trainer_wait_share": round(waiting / stepping, 3) if stepping else 0.0,
        "reward_first": _mean(rewards[:ENDS]),
        "reward_last": _mean(rewards[-ENDS:]),
        "skipped": dict(state.skips),
        "restarts": restarts,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _weighted_mean(state: RunState, key: str) -> float:
    total = sum(point.trajectories for point in state.steps)
    weighted = sum(point.metrics.get(key, 0.0) * point.trajectories for point in state.steps)
    return weighted / total if total else 0.0


def write_summary(path: Path, summary: Summary) -> None:
    """Write the JSON file."""
    path.write_text(json.dumps(summary, indent=2) + "\n")


def summary_lines(summary: Summary) -> list[str]:
    """What the terminal shows at the end."""
    lines = [""]
    for name in (key.removesuffix("_before") for key in summary if key.endswith("_before")):
        before, after = summary[f"{name}_before"], summary.get(f"{name}_after")
        gain = "" if after is None else f" → {after:.3f} after ({after - before:+.3f})"
        lines.append(f"{name.replace('_', ' ')}: {before:.3f} before{gain}")
    first, last = summary["reward_first"], summary["reward_last"]
    if first is not None and last is not None:
        lines.append(f"reward: {first:.3f} → {last:.3f} (first and last {ENDS} steps)")
    rates = f"{summary['trajectories_per_s']:.0f} trajectories/s, {summary['tokens_per_s']:.0f} tokens/s"
    return [
        *lines,
        _taken(summary),
        f"{rates} once running ({summary['step_seconds']:.1f} s of optimizer steps)",
        f"staleness {summary['staleness_mean']:.2f} mean, {summary['staleness_max']:.0f} max (optimizer steps)",
        f"trainer waited for trajectories {summary['trainer_wait_share']:.0%} of its time",
    ]


def _taken(summary: Summary) -> str:
    """The steps of this start, with its wall-clock; trajectories are counted over all starts."""
    steps, before = summary["steps"], summary["resumed_from"]
    within = f"in {summary['run_seconds']:.0f} s, start and end included"
    trained = f"{summary['trajectories']} trajectories trained"
    if not before:
        return f"{steps} steps {within}; {trained}"
    if steps > before:
        return f"steps {before + 1} to {steps} {within}; {trained} since step 1"
    return f"no step {within}; {steps} steps before, {trained}"
