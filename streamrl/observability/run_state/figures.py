"""The figures of a running run: the name, unit, meaning and computation of each, in one place.

`status`, `top`, the page, the lines of `streamrl run` and their JSON all show these values under these names. Figures
of whole runs (`summary.json`, `report`) have the same names if they mean the same over all steps.
Invariant one_meaning_one_name_one_value: views of one run at one moment show equal values under a name.
"""

from collections.abc import Mapping
from typing import NamedTuple

from streamrl.observability.run_state.state import RunState

Value = float | int | None


class FigureMeaning(NamedTuple):
    """A figure's unit and meaning. ``unit``: empty for a plain number."""

    unit: str
    meaning: str


LIVE: Mapping[str, FigureMeaning] = {
    "step": FigureMeaning("optimizer steps", "steps taken since the run started, without those that a crash undid"),
    "max_steps": FigureMeaning("optimizer steps", "steps after which the run is finished (`training.max_steps`)"),
    "time_left_s": FigureMeaning("s", "time until `max_steps`, at the pace of the last ten steps"),
    "step_age_s": FigureMeaning("s", "time since the newest step was reported"),
    "steps_per_min": FigureMeaning("steps/min", "pace of the last ten steps; it falls while the next one is overdue"),
    "reward": FigureMeaning("", "mean over the trajectories of the newest step"),
    "pass_at_1": FigureMeaning(
        "share", "held-out samples that passed, with the newest evaluated weights (`[evaluation]`)"
    ),
    "staleness_mean": FigureMeaning(
        "optimizer steps", "mean age of the oldest tokens of the newest step's trajectories"
    ),
    "staleness_max": FigureMeaning("optimizer steps", "largest age among them; never above `loop.max_staleness`"),
    "ordered_per_s": FigureMeaning("trajectories/s", "rate at which workers got orders, over the last 10 s"),
    "sampled_per_s": FigureMeaning("trajectories/s", "rate at which workers published them, over the last 10 s"),
    "trajectories_per_s": FigureMeaning("trajectories/s", "rate of training, over the last ten steps"),
    "sampled_tokens_per_s": FigureMeaning("tokens/s", "completion tokens that live workers sample now"),
    "lag": FigureMeaning("trajectories", "published, but not yet trained or skipped"),
    "skipped": FigureMeaning("trajectories", "skipped since the run started, each with a reason on the `skips` topic"),
    "dead_letters": FigureMeaning("records", "records that could not be decoded"),
    "workers": FigureMeaning("", "workers that sent a heartbeat in the last 10 s and have not left"),
    "running": FigureMeaning("completions", "completions that live workers are sampling"),
    "waiting": FigureMeaning("completions", "completions that wait for a slot at live workers"),
    "capacity": FigureMeaning("completions", "most completions that live workers sample at once"),
    "weights_per_min": FigureMeaning("versions/min", "weight versions announced in the last minute"),
}
"""All figures, in the order of the documentation."""


def live_figures(state: RunState, now: float) -> dict[str, Value]:
    """The values of all figures at a time in epoch seconds; None: not known."""
    metrics, alive, pace = (
        state.metrics,
        state.living_workers(now),
        state.learning.steps.pace(None if state.progress.finished else now),
    )
    return {
        "step": state.progress.step,
        "max_steps": state.max_steps,
        "time_left_s": _time_left_s(state, pace.steps_per_s),
        # Not below 0: the report's time stamp is from the trainer's clock, which may be ahead of ours.
        "step_age_s": None if state.progress.step_at is None else round(max(0.0, now - state.progress.step_at), 1),
        "steps_per_min": round(pace.steps_per_s * 60, 2),
        "reward": metrics.get("reward"),
        "pass_at_1": state.learning.evaluations.pass_at_1,
        "staleness_mean": metrics.get("off_policy/mean"),
        "staleness_max": metrics.get("off_policy/max"),
        "ordered_per_s": round(state.processes.rates["ordered"].per_s(now), 2),
        "sampled_per_s": round(state.processes.rates["sampled"].per_s(now), 2),
        "trajectories_per_s": round(pace.trajectories_per_s, 2),
        "sampled_tokens_per_s": round(sum(beat.tokens_per_s for beat in alive)),
        "lag": sum(state.lag.values()),
        "skipped": sum(state.skipped.values()),
        # The trainer counts since its process started, and retention deletes from the topic: the larger one is nearer.
        "dead_letters": max(int(metrics.get("kafka/dead_letters", 0)), state.refusals.dead_letters),
        "workers": len(alive),
        "running": sum(beat.running for beat in alive),
        "waiting": sum(beat.waiting for beat in alive),
        "capacity": sum(beat.capacity for beat in alive),
        "weights_per_min": round(state.processes.rates["weights"].per_s(now) * 60, 2),
    }


def span_text(seconds: float) -> str:
    """A duration as text, in s, min or h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _time_left_s(state: RunState, steps_per_s: float) -> float | None:
    if state.progress.finished:
        return 0.0
    if state.max_steps is None or not steps_per_s:
        return None
    return round(max(0, state.max_steps - state.progress.step) / steps_per_s)
