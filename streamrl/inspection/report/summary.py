"""Summarises a run as one JSON object, and in a few lines for the terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.inspection.audit.report import AuditReport
from streamrl.observability.run_state.aggregates import ENDS, window_name
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.reports import SkipReason

Summary = dict[str, Any]
ORDINARY = frozenset({SkipReason.ZERO_ADVANTAGE, SkipReason.DUPLICATE})
"""Skip reasons that need no action: groups of equal rewards, and trajectories that were sampled twice."""
LEFT_OVER = "left over: sampled, not trained before the run ended"
"""Words after the number of trajectories that a run leaves."""


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
    held_out_prompts: int | None = None,
    audit: AuditReport | None = None,
) -> Summary:
    """Figures of a run over all its starts. Only ``run_seconds`` is of this start, from its processes' start to end.

    ``resumed_from``: the step of the checkpoint that this start resumed from; 0 for none. ``step_seconds``: the sum of
    the optimizer steps, which rates are over. ``tokens_per_s``: of trained completions. Rewards are means of the first
    and last ``reward_steps`` steps, at most five; they share no step. ``staleness_*``: in optimizer steps, the mean
    over trained trajectories, each by its oldest span. ``trainer_wait_share``: share of step time spent waiting for a
    batch. ``skipped``: trajectories by reason; ``skip_causes``: skips that may need action, by common cause, with an
    example. ``lag``: trajectories that were left over, sampled and neither trained nor skipped before the run ended.
    ``evaluation``: results on held-out prompts, at the first and last weights that were evaluated.
    ``held_out_prompts``: of ``evaluation.function``. ``audit``: the verdict of the audit at the end, if there was one.
    """
    sums, newest = state.learning.steps.sums(), state.learning.steps.newest
    first, last = state.learning.steps.reward_windows()
    return {
        "engine": engine,
        "seed": seed,
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        **({} if held_out_prompts is None else {"held_out_prompts": held_out_prompts}),
        "run_seconds": round(run_seconds, 2),
        "step_seconds": round(sums.step_s, 2),
        "resumed_from": resumed_from,
        "steps": 0 if newest is None else newest.step,
        "trajectories": sums.trajectories,
        "trajectories_per_s": round(_ratio(sums.trajectories, sums.step_s), 2),
        "tokens_per_s": round(_ratio(sums.tokens, sums.step_s), 1),
        "staleness_mean": round(_ratio(sums.staleness, sums.trajectories), 3),
        "staleness_max": sums.staleness_max,
        "trainer_wait_share": round(_ratio(sums.wait_s, sums.step_s), 3),
        "reward_first": _mean(first),
        "reward_last": _mean(last),
        "reward_steps": len(last),
        **({"evaluation": _evaluation(state)} if state.learning.evaluations.rows else {}),
        "skipped": state.skipped,
        "lag": sum(state.lag.values()),
        "lag_by_bucket": state.lag,
        "skip_causes": {
            reason: {"counts": dict(causes.counts.most_common()), "example": causes.example}
            for reason, causes in sorted(state.refusals.skip_causes.items())
        },
        "restarts": restarts,
        **({} if audit is None else {"audit": _audited(audit)}),
    }


def _evaluation(state: RunState) -> dict[str, Any]:
    rows = state.learning.evaluations.rows
    return {
        "versions": len(rows),
        **{
            when: {"step": version.number, **{name: round(value, 4) for name, value in metrics.items()}}
            for when, (version, metrics) in (("first", rows[0]), ("last", rows[-1]))
        },
    }


def _audited(audit: AuditReport) -> dict[str, Any]:
    total = audit.to_json()["total"]
    return {"balanced": audit.is_balanced, **total, "problems": [str(each) for each in audit.violations]}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def write_summary(path: Path, summary: Summary) -> None:
    """Write the JSON file."""
    path.write_text(json.dumps(summary, indent=2) + "\n")


def summary_lines(summary: Summary) -> list[str]:
    """Lines that the terminal shows at the end of a run."""
    lines = [""]
    for name in (key.removesuffix("_before") for key in summary if key.endswith("_before")):
        before, after = summary[f"{name}_before"], summary.get(f"{name}_after")
        gain = "" if after is None else f" → {after:.3f} after ({after - before:+.3f})"
        lines.append(f"{name.replace('_', ' ')}: {before:.3f} before{gain}")
    lines += _reward_lines(summary)
    if (evaluated := summary.get("evaluation")) is not None:
        first, last = evaluated["first"], evaluated["last"]
        for name in (name for name in last if name.startswith("eval/pass@")):
            values, steps = f"{last[name]:.3f}", f"step {last['step']}"
            if first["step"] != last["step"]:
                values = f"{first.get(name, 0.0):.3f} → {values}"
                steps = f"steps {first['step']} and {last['step']}"
            lines.append(f"{name.removeprefix('eval/')}: {values} (held out, {steps})")
    rates = f"{summary['trajectories_per_s']:.0f} trajectories/s, {summary['tokens_per_s']:.0f} completion tokens/s"
    return [
        *lines,
        _taken(summary),
        f"{rates}, start-up excluded ({summary['step_seconds']:.1f} s of optimizer steps)",
        f"staleness {summary['staleness_mean']:.2f} mean, {summary['staleness_max']:.0f} max (optimizer steps)",
        f"trainer waited for trajectories {summary['trainer_wait_share']:.0%} of its time",
        *_skip_lines(summary),
        *([f"{summary['lag']:,} {LEFT_OVER}"] if summary.get("lag") else []),
        *_verdict(summary.get("audit")),
    ]


def _reward_lines(summary: Summary) -> list[str]:
    first, last = summary["reward_first"], summary["reward_last"]
    if last is None:
        return []
    # A summary of an older release has no number of steps.
    windows = f"first and {window_name('last', summary.get('reward_steps', ENDS))}"
    return [f"reward: {last:.3f} (one step)" if first is None else f"reward: {first:.3f} → {last:.3f} ({windows})"]


def _skip_lines(summary: Summary) -> list[str]:
    """Lines on skipped trajectories, except ordinary skips: one line for all, and one per cause."""
    counted = {reason: count for reason, count in summary["skipped"].items() if reason not in ORDINARY}
    if not counted:
        return []
    words = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counted.items())
    lines = [f"skipped: {words} (trajectories)"]
    for reason, found in summary["skip_causes"].items():
        counts = ", ".join(f"{count:,} {cause}" for cause, count in found["counts"].items())
        lines.append(f"  {reason.replace('_', ' ')}: {counts}; for example {' '.join(found['example'].split())}")
    return lines


def _verdict(audit: dict[str, Any] | None) -> list[str]:
    if audit is None:
        return []
    if not audit["balanced"]:
        return [f"audit: NOT BALANCED: {next(iter(audit['problems']), 'the figures do not add up')}"]
    parts = " + ".join(f"{audit[name]} {name}" for name in ("trained", "skipped", "pending"))
    return [f"audit: balanced, {audit['produced']} trajectories = {parts}"]


def _taken(summary: Summary) -> str:
    """A line with the steps of this start and its wall-clock time. Trajectories are counted over all starts."""
    steps, before = summary["steps"], summary["resumed_from"]
    within = f"in {summary['run_seconds']:.0f} s from the start of its processes to their end"
    trained = f"{summary['trajectories']} trajectories trained"
    if not before:
        return f"{steps} steps {within}; {trained}"
    if steps > before:
        return f"steps {before + 1} to {steps} {within}; {trained} since step 1"
    return f"no step {within}; {steps} steps before, {trained}"
