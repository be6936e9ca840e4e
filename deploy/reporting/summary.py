"""The run in one JSON object, and in a few lines for the terminal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.observation.state import RunState

Summary = dict[str, Any]


def build_summary(
    state: RunState,
    *,
    engine: str,
    seed: int,
    train_seconds: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
    restarts: int,
) -> Summary:
    """Figures of a run: ``train_seconds`` is the wall-clock from starting the processes to their end.

    Rates are over the time between the first and the last step report. ``staleness_*`` is in optimizer steps, the
    mean over trained tokens' oldest spans; ``trainer_wait_share`` is the share of step time spent waiting for a batch.
    """
    steps = state.steps
    trajectories = sum(point.trajectories for point in steps)
    tokens = sum(point.metrics.get("completions/num_tokens", 0.0) for point in steps)
    waiting = sum(point.metrics.get("time/wait_for_batch", 0.0) for point in steps)
    stepping = sum(point.metrics.get("time/step", 0.0) for point in steps)
    return {
        "engine": engine,
        "seed": seed,
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        "train_seconds": round(train_seconds, 2),
        "steps": steps[-1].step if steps else 0,
        "trajectories": trajectories,
        "trajectories_per_s": round(trajectories / stepping, 2) if stepping else 0.0,
        "tokens_per_s": round(tokens / stepping, 1) if stepping else 0.0,
        "staleness_mean": round(_weighted_mean(state, "off_policy/mean"), 3),
        "staleness_max": max((point.metrics.get("off_policy/max", 0.0) for point in steps), default=0.0),
        "trainer_wait_share": round(waiting / stepping, 3) if stepping else 0.0,
        "reward_first": round(steps[0].metrics.get("reward", 0.0), 4) if steps else None,
        "reward_last": round(steps[-1].metrics.get("reward", 0.0), 4) if steps else None,
        "skipped": dict(state.skips),
        "restarts": restarts,
    }


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
    return [
        *lines,
        f"{summary['steps']} steps in {summary['train_seconds']:.0f} s, {summary['trajectories']} trajectories trained",
        f"{summary['trajectories_per_s']:.0f} trajectories/s, {summary['tokens_per_s']:.0f} tokens/s",
        f"staleness {summary['staleness_mean']:.2f} mean, {summary['staleness_max']:.0f} max (optimizer steps)",
        f"trainer waited for trajectories {summary['trainer_wait_share']:.0%} of its time",
    ]
