"""Computes the final figures of a run, in the same way for every run, so that runs can be compared."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from streamrl.inspection.report.record import RunRecord, StepTable, TopicDigest, ValueFacts
from streamrl.observability.run_state.aggregates import ENDS, end_windows, window_name
from streamrl.observability.run_state.evaluations import OVERALL

Kind = Literal["count", "share", "seconds", "rate", "value", "text"]
Value = float | int | str | None


class Figure(NamedTuple):
    """One figure of a run. ``better``: 1 if more is better, -1 if less is better, 0 if neither."""

    key: str
    label: str
    value: Value
    kind: Kind = "value"
    better: int = 0


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Reward": ("reward_first", "reward_last", "reached_step", "reached_tokens", "reached_seconds"),
    "Policy": ("kl", "entropy", "mean_length"),
    "Speed": (
        "steps", "train_seconds", "step_seconds", "trajectories", "trajectories_per_s", "tokens", "tokens_per_s",
        "trainer_wait_share", "workers_busy", "padding",
    ),
    "Stream": ("staleness_mean", "staleness_max", "lag_mean", "length_recall", "length_coverage", "length_factor"),
    "Not trained": ("skipped", "skipped_share", "dead_letters", "restarts"),
}  # fmt: skip
"""The figures by their keys, as a page groups them; all others are of held-out prompts."""


def shown(figure: Figure) -> str:
    """A figure as text for people."""
    value = figure.value
    if not isinstance(value, int | float):
        return str(value)
    match figure.kind:
        case "share":
            return f"{value:.1%}"
        case "seconds":
            return seconds_shown(value)
        case "count":
            return f"{value:,.0f}"
        case "rate":
            return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        case _:
            return f"{value:.4g}"


def seconds_shown(value: float) -> str:
    """A time as text, in seconds, minutes or hours."""
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def figures_of(record: RunRecord, level: float | None = None) -> list[Figure]:
    """Figures of a run; with ``level``, also when the reward reached it. Rates are over the sum of step times."""
    rows = record.rows
    # Over the time of steps rather than wall-clock: pauses between two starts of the trainer do not count.
    stepping, trained = rows.total("time/step"), rows.total("ledger/trained")
    first, last = end_windows(rows.known("reward"))
    staleness = _weighted(rows, "off_policy/mean")
    found = [
        *_evaluated(record),
        *_held_out(record),
        Figure("reward_first", f"reward, {window_name('first', len(first))}", _mean(first)),
        Figure("reward_last", f"reward, {window_name('last', len(last))}", _mean(last), better=1),
        *_reaching(rows, level),
        Figure("steps", "optimizer steps", rows.steps[-1] if rows.steps else 0, "count"),
        Figure("train_seconds", "training, wall-clock", rows.seconds, "seconds"),
        Figure("step_seconds", "time of optimizer steps", stepping or None, "seconds"),
        Figure("trajectories", "trajectories trained", round(trained), "count"),
        Figure("trajectories_per_s", "trajectories a second", _ratio(trained, stepping), "rate", 1),
        Figure(
            "tokens_per_s",
            "completion tokens a second",
            _ratio(rows.total("completions/num_tokens"), stepping),
            "rate",
            1,
        ),
        Figure(
            "tokens", "completion tokens of all steps", round(rows.total("completions/num_tokens")) or None, "count", -1
        ),
        Figure("kl", "KL to the initial model, last steps", _mean(rows.known("kl")[-ENDS:])),
        Figure("entropy", "entropy, last steps (nats a token)", _mean(rows.known("entropy")[-ENDS:])),
        Figure("mean_length", "completion length, last steps", _mean(rows.known("completions/mean_length")[-ENDS:])),
        Figure("staleness_mean", "staleness, mean (steps)", staleness),
        Figure("staleness_max", "staleness, max (steps)", max(rows.known("off_policy/max"), default=None)),
        Figure(
            "trainer_wait_share", "trainer waiting", _ratio(rows.total("time/wait_for_batch"), stepping), "share", -1
        ),
        Figure("padding", "padding waste", _mean(rows.known("padding/all")), "share", -1),
        Figure("lag_mean", "lag, mean (trajectories not finished)", _mean(rows.known("report/lag"))),
        *_gathered(record.facts.topics, rows),
        *_endings(record, trained),
    ]
    return [figure for figure in found if figure.value is not None]


def common_level(all_rows: Iterable[StepTable]) -> float | None:
    """The highest reward that every run reached as a mean over ``ENDS`` steps; None if a run has no reward."""
    bests = [max(_smoothed(rows), default=None) for rows in all_rows]
    known = [best for best in bests if best is not None]
    # A run without rewards could never reach any level.
    return min(known) if known and len(known) == len(bests) else None


def reached(rows: StepTable, level: float) -> tuple[int, float] | None:
    """Step and seconds at which the mean reward of the last ``ENDS`` steps first reached the level; None if never."""
    places = [index for index, row in enumerate(rows.metrics) if "reward" in row]
    for index, value in zip(places[ENDS - 1 :], _smoothed(rows), strict=True):
        # With a tolerance: the level may be a mean of this very run, which must reach it.
        if value >= level - 1e-9:
            return rows.steps[index], rows.times[index]
    return None


def _smoothed(rows: StepTable) -> list[float]:
    rewards = rows.known("reward")
    return [sum(rewards[end - ENDS : end]) / ENDS for end in range(ENDS, len(rewards) + 1)]


def _reaching(rows: StepTable, level: float | None) -> list[Figure]:
    if level is None:
        return []
    found = reached(rows, level)
    return [
        Figure("reached_step", f"steps to reward {level:.4g}", found[0] if found else "never", "count", -1),
        Figure("reached_tokens", f"tokens to reward {level:.4g}", _tokens_to(rows, found), "count", -1),
        Figure("reached_seconds", f"time to reward {level:.4g}", found[1] if found else "never", "seconds", -1),
    ]


def _tokens_to(rows: StepTable, found: tuple[int, float] | None) -> int | str | None:
    """Completion tokens of the steps until the level was reached."""
    if found is None:
        return "never"
    spent = [
        row.get("completions/num_tokens")
        for step, row in zip(rows.steps, rows.metrics, strict=True)
        if step <= found[0]
    ]
    return round(sum(tokens for tokens in spent if tokens is not None)) or None


def _evaluated(record: RunRecord) -> list[Figure]:
    """Held-out metrics of the summary, whose names end with the moment."""
    found = []
    for moment, better in (("before", 0), ("after", 1)):
        for key, value in record.summary.items():
            if key.endswith(f"_{moment}") and isinstance(value, int | float):
                name = key.removesuffix(f"_{moment}").replace("_", " ")
                found.append(Figure(key, f"{name} (held out), {moment}", value, "value", better))
    return found


def _held_out(record: RunRecord) -> list[Figure]:
    """pass@1 on held-out prompts, at the first and the last weights that were evaluated during the run."""
    values = [metrics[OVERALL] for _, metrics in record.rows.evaluations if OVERALL in metrics]
    if not values:
        return []
    return [
        Figure("pass_at_1_first", "pass@1 (held out), first weights", values[0], "value"),
        Figure("pass_at_1_last", "pass@1 (held out), last weights", values[-1], "value", 1),
    ]


def _gathered(topics: TopicDigest | None, rows: StepTable) -> list[Figure]:
    if topics is None:
        return []
    begin, end = rows.began, rows.began + rows.seconds
    busy = [_ratio(each.busy_s(begin, end), end - begin) for each in topics.workers.values()]
    known = [share for share in busy if share is not None]
    lengths, value = topics.lengths, topics.value
    return [
        Figure("workers_busy", "workers generating", _mean(known), "share", 1),
        Figure("length_recall", "recall of the longest 20 %", lengths.recall if lengths else None, "share", 1),
        Figure("length_coverage", "lengths below the upper estimate", lengths.coverage if lengths else None, "share"),
        Figure("length_factor", "length off by a factor of", lengths.factor if lengths else None, "value", -1),
        Figure("zero_advantage", "groups without advantage", value.observed if value else None, "share", -1),
        Figure("zero_advantage_error", "their prediction off by", value.error if value else None, "share", -1),
        Figure("passed_over", "prompts passed over", _share_passed_over(value), "share"),
    ]


def _share_passed_over(value: ValueFacts | None) -> float | None:
    return value.passed_over / value.decided if value is not None and value.decided else None


def _endings(record: RunRecord, trained: float) -> list[Figure]:
    skipped = _total(record.summary.get("skipped"))
    share = None if skipped is None or not skipped + trained else skipped / (skipped + trained)
    restarts = record.summary.get("restarts")
    dead = record.rows.known("kafka/dead_letters")
    return [
        Figure("skipped", "trajectories skipped", skipped, "count", -1),
        Figure("skipped_share", "share skipped", share, "share", -1),
        Figure("dead_letters", "dead letters", round(dead[-1]) if dead else None, "count", -1),
        Figure("restarts", "processes restarted", restarts if isinstance(restarts, int) else None, "count", -1),
    ]


def _total(counts: object) -> int | None:
    return sum(value for value in counts.values() if isinstance(value, int)) if isinstance(counts, dict) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and part > 0 else None


def _weighted(rows: StepTable, key: str) -> float | None:
    """Mean of a metric over trained trajectories."""
    pairs = [(row[key], row.get("ledger/trained", 1.0)) for row in rows.metrics if key in row]
    weight = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / weight if weight else None
