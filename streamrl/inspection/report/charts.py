"""Data of a report's charts: curves over steps, a track of intervals per process, and shares of the time.

Each line of a curve names its run, whose axes (``axes``) all its lines share. Tracks are in milliseconds since the
run's start. Invariant the_page_stays_small: a line has at most ``POINTS`` points for a run of any length. In a long run
each point is the mean of several steps.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from streamrl.inspection.report.record import RunRecord, StepTable, TrainerSpan, WorkerActivity
from streamrl.observability.run_state.aggregates import LAG_PREFIX
from streamrl.observability.run_state.evaluations import OVERALL

POINTS = 600
MARKS = 40
"""Most marks of a run that are drawn, the newest ones: more would hide the curves."""


class Curve(NamedTuple):
    """A chart. ``keys``: metrics and their labels. If runs are compared, only the first metric is drawn.

    A ``*`` in a key matches any text, so the key can match several metrics.
    """

    title: str
    unit: str
    keys: tuple[tuple[str, str], ...]
    note: str = ""


CURVES: tuple[tuple[str, tuple[Curve, ...]], ...] = (
    (
        "Learning",
        (
            Curve("Reward", "", (("reward", "mean"), ("reward_std", "deviation within groups"))),
            Curve("Parts of the reward", "", (("rewards/*/mean", ""),)),
            Curve(
                "Completion length",
                "tokens",
                (
                    ("completions/mean_length", "mean"),
                    ("completions/max_length", "longest"),
                    ("completions/min_length", "shortest"),
                ),
            ),
            Curve("Share cut at the length limit", "share", (("completions/clipped_ratio", "cut"),)),
            Curve("Groups without advantage", "share", (("frac_reward_zero_std", "all rewards equal"),)),
        ),
    ),
    (
        "Optimizer",
        (
            Curve("Loss", "", (("loss", "loss"),)),
            Curve("Gradient norm", "", (("grad_norm", "before clipping"),)),
            Curve("Entropy", "nats a token", (("entropy", "entropy"),)),
            Curve("KL to the sampler", "nats a token", (("mismatch_kl/all/mean", "trainer against sampler"),)),
            Curve("KL to the reference", "nats a token", (("kl", "policy against reference"),)),
            Curve(
                "Clipped tokens",
                "share",
                (
                    ("clip_ratio/region_mean", "all"),
                    ("clip_ratio/low_mean", "low"),
                    ("clip_ratio/high_mean", "high"),
                ),
            ),
            Curve("Learning rate", "", (("optim/lr", "learning rate"),)),
            Curve("Critic's loss", "", (("critic/loss", "value loss"),)),
            Curve("Critic's explained variance", "share", (("critic/explained_variance", "of the returns"),)),
            Curve("Preferences", "share", (("preference/accuracy", "pairs in the right order"),)),
            Curve("Margin of preferences", "", (("preference/margin", "margin"),)),
            Curve("KL to the teacher", "nats a token", (("distillation/reverse_kl", "policy against teacher"),)),
            Curve("Masked importance weights", "share", (("sampling/masked_ratio", "of tokens"),)),
        ),
    ),
    (
        "The stream",
        (
            Curve("Staleness", "optimizer steps", (("off_policy/mean", "mean"), ("off_policy/max", "max"))),
            Curve("Lag", "trajectories not finished", (("report/lag", "all buckets"),)),
            Curve("Lag by length bucket", "trajectories not finished", ((f"{LAG_PREFIX}*", "bucket "),)),
            Curve(
                "Padding waste", "share of computed tokens", (("padding/all", "all"), ("padding/bucket_*", "bucket "))
            ),
            Curve("Throughput", "tokens a second", (("report/tokens_per_s", "trained"),)),
            Curve(
                "Time of a step",
                "seconds",
                (
                    ("time/step", "whole"),
                    ("time/wait_for_batch", "waiting"),
                    ("time/forward_backward", "forward, backward"),
                    ("time/broadcast_weights", "publishing weights"),
                    ("time/save_ckpt", "checkpoint"),
                ),
            ),
            Curve("Trainer waiting", "share of the step", (("report/wait_share", "waiting"),)),
        ),
    ),
)
ONLY_COMPARED = frozenset({"Trainer waiting", "Lag"})
"""Curves whose data other curves show if there is only one run."""


def axes(rows: StepTable) -> dict[str, Any]:
    """The horizontal axes of a run: steps, and seconds since the start of its first step."""
    stride = _stride(rows)
    # A point is at the last step of its stride, and at that step's end.
    return {
        "step": [rows.steps[min(at + stride, len(rows.steps)) - 1] for at in range(0, len(rows.steps), stride)],
        "time": [short(rows.times[min(at + stride, len(rows.times)) - 1]) for at in range(0, len(rows.times), stride)],
        "stride": stride,
    }


def curves(all_rows: Sequence[StepTable]) -> list[dict[str, Any]]:
    """Groups of curves that have data: with all their lines for one run, with one line per run for several."""
    groups = []
    for title, wanted in CURVES:
        drawn = [curve for each in wanted if (curve := _drawn(each, all_rows)) is not None]
        if title == CURVES[0][0]:
            drawn += _evaluations(all_rows)
        if drawn:
            groups.append({"title": title, "curves": drawn})
    return groups


def _drawn(curve: Curve, all_rows: Sequence[StepTable]) -> dict[str, Any] | None:
    if len(all_rows) == 1:
        lines = [] if curve.title in ONLY_COMPARED else _all_lines(curve, all_rows[0])
    else:
        key = curve.keys[0][0]
        lines = [line for number, rows in enumerate(all_rows) if (line := _line(rows, key, number, "")) is not None]
    return {"title": curve.title, "unit": curve.unit, "lines": lines} if lines else None


def _evaluations(all_rows: Sequence[StepTable]) -> list[dict[str, Any]]:
    """pass@k on held-out prompts, over the steps whose weights were evaluated; only pass@1 for several runs."""
    lines = []
    for number, rows in enumerate(all_rows):
        keys = sorted({key for _, metrics in rows.evaluations for key in metrics if "/pass@" in key})
        if len({key.rpartition("/")[0] for key in keys}) == 2:  # a single set, whose values are those over all sets
            keys = [key for key in keys if key.count("/") == 1]
        for key in keys if len(all_rows) == 1 else [key for key in keys if key == OVERALL]:
            known = [(step, short(metrics[key])) for step, metrics in rows.evaluations if key in metrics]
            name, x, y = key.removeprefix("eval/"), [step for step, _ in known], [value for _, value in known]
            lines.append({"run": number, "name": name, "at": x, "y": y})
    return [{"title": "Held-out prompts passed", "unit": "share", "axis": "step", "lines": lines}] if lines else []


def marks(record: RunRecord) -> list[dict[str, Any]]:
    """The moments that may explain a jump in the run's curves, each with its step, seconds, kind and words."""
    rows, topics = record.rows, record.facts.topics
    found: list[tuple[float, str, str]] = [(mark.at, mark.kind, mark.text) for mark in (topics.marks if topics else ())]
    for start in (each for each in record.starts if each.is_marked):
        # This start caused the first restart after it: both are one mark, with the words of the start.
        own = next((mark for mark in found if mark[0] >= start.at and mark[1] == "restart"), None)
        found = [mark for mark in found if mark is not own]
        text, kind = start.mark()
        found.append((own[0] if own else start.at, kind, text))
    return [_mark(rows, *each) for each in sorted(found)[-MARKS:] if rows.steps]


def _mark(rows: StepTable, at: float, kind: str, text: str) -> dict[str, Any]:
    done = bisect_right(rows.times, at - rows.began)
    step = rows.steps[done - 1] if done else rows.steps[0]
    return {"step": step, "time": short(max(0.0, at - rows.began)), "kind": kind, "text": text}


def _all_lines(curve: Curve, rows: StepTable) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    for key, word in curve.keys:
        before, star, after = key.partition("*")
        if not star:
            names[key] = word
            continue
        # In rewards/*/mean, for example, the text that the star matches names the line.
        for found in rows.keys(before):
            if found.endswith(after):
                names[found] = word + found.removeprefix(before).removesuffix(after)
    lines = [line for key, name in names.items() if (line := _line(rows, key, 0, name)) is not None]
    # A line of zeros is dropped if there are others. Alone it shows that nothing happened.
    return [line for line in lines if len(lines) < 2 or any(line["y"])]


def _line(rows: StepTable, key: str, run: int, name: str) -> dict[str, Any] | None:
    column, stride = rows.column(key), _stride(rows)
    points = [_mean(column[at : at + stride]) for at in range(0, len(column), stride)]
    return {"run": run, "name": name, "y": points} if any(point is not None for point in points) else None


def _stride(rows: StepTable) -> int:
    # Rounded up, so that there are never more than ``POINTS`` points.
    return -(-len(rows.steps) // POINTS) or 1  # at least 1, because ``range`` refuses a step of 0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return short(sum(known) / len(known)) if known else None


def short(value: float) -> float:
    """The value rounded to five digits, which are enough to draw."""
    return float(f"{value:.5g}")


def order_over_time(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Curves over wall-clock: the recall of the longest completions, and the share below the upper estimates."""
    recall: list[dict[str, Any]] = []
    coverage: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        lengths = record.facts.topics.lengths if record.facts.topics else None
        if lengths is None or len(lengths.windows) < 2:  # one window is a point, not a curve
            continue
        at = [short(max(0.0, when - record.rows.began)) for when, _, _ in lengths.windows]
        for lines, name, values in (
            (recall, "longest 20 % recalled", [each[1] for each in lengths.windows]),
            (coverage, "below the upper estimate", [each[2] for each in lengths.windows]),
        ):
            if any(value is not None for value in values):
                points = [None if value is None else short(value) for value in values]
                lines.append({"run": number, "name": name, "at": at, "y": points})
    wanted = [recall + coverage] if len(records) == 1 else [recall]
    title = "Length estimates over the run" if len(records) == 1 else "Recall of the longest over the run"
    return [{"title": title, "unit": "share", "axis": "time", "lines": lines} for lines in wanted if lines]


MOST = 6000
"""Most intervals of a track. If there are more, time is cut into small pieces, each drawn as its most frequent kind."""
KINDS = {
    "wait_for_batch": "wait",
    "forward_backward": "train",
    "optimizer": "optimizer",
    "save_ckpt": "checkpoint",
    "broadcast_weights": "publish",
    "announce": "publish",
    "digests": "publish",
}
OTHER = "other"
WORKERS = 32
"""Most workers of a run that are drawn, in the order of their names."""
DrawnInterval = tuple[int, int, str]


def timeline(record: RunRecord) -> dict[str, Any]:
    """The tracks of the trainer and of each worker; empty if there is nothing to draw. ``end`` is in milliseconds."""
    rows, topics = record.rows, record.facts.topics
    workers = topics.workers if topics else {}
    tracks = [_trainer_track(rows)] if rows.spans else []
    tracks += [_worker_track(name, activity, rows.began) for name, activity in list(workers.items())[:WORKERS]]
    # The last span may end after the last step was written, and the last step after the last span.
    ends = [span.end - rows.began for span in rows.spans] + [rows.seconds]
    return {"lanes": tracks, "end": round(max(ends) * 1000)}


def shares(record: RunRecord) -> list[dict[str, Any]]:
    """Each process's shares of the time by kind, from the start of the first step to the end of the last."""
    rows, topics = record.rows, record.facts.topics
    if not rows.seconds:
        return []
    taken: dict[str, float] = {}
    for span in rows.spans or _from_metrics(rows):
        kind = KINDS.get(span.kind, OTHER)
        taken[kind] = taken.get(kind, 0.0) + span.end - span.start
    found = [{"name": "trainer", "parts": _parts(taken, rows.seconds, OTHER)}] if taken else []
    for name, activity in list((topics.workers if topics else {}).items())[:WORKERS]:
        busy = activity.busy_s(rows.began, rows.began + rows.seconds)
        found.append({"name": name, "parts": _parts({"generate": busy}, rows.seconds, "wait")})
    return found


def _from_metrics(rows: StepTable) -> list[TrainerSpan]:
    """Spans from a trainer's metrics, which only have their lengths. Used if it recorded no spans."""
    return [TrainerSpan(name, 0.0, seconds) for name in KINDS if (seconds := rows.total(f"time/{name}")) > 0]


def _parts(taken: dict[str, float], whole: float, rest: str) -> list[tuple[str, float]]:
    order = ("generate", "train", "optimizer", "publish", "checkpoint", OTHER, "wait")
    # The time outside all phases.
    left = whole - sum(taken.values())
    taken = taken | {rest: taken.get(rest, 0.0) + max(0.0, left)}
    # Not ``whole``: overlapping phases and phases of undone steps add up to more.
    total = sum(taken.values())
    return [(kind, round(taken[kind] / total, 4)) for kind in order if taken.get(kind, 0.0) / total >= 0.0005]


def _trainer_track(rows: StepTable) -> dict[str, Any]:
    intervals = [_interval(span, KINDS.get(span.kind, OTHER), rows.began) for span in rows.spans]
    return {"name": "trainer", "kinds": _by_kind(_few(intervals)), "marks": []}


def _worker_track(name: str, activity: WorkerActivity, began: float) -> dict[str, Any]:
    intervals = [_interval(TrainerSpan("generate", *each), "generate", began) for each in activity.generating]
    marks = [[round((at - began) * 1000), version] for at, version in activity.adopted]
    return {"name": name, "kinds": _by_kind(intervals), "marks": marks}


def _interval(span: TrainerSpan, kind: str, began: float) -> DrawnInterval:
    return round((span.start - began) * 1000), round((span.end - began) * 1000), kind


def _by_kind(intervals: Iterable[DrawnInterval]) -> dict[str, list[int]]:
    """By kind: start, length, start, length ..."""
    found: dict[str, list[int]] = {}
    for start, end, kind in intervals:
        if end > start:
            found.setdefault(kind, []).extend((start, end - start))
    return found


def _few(intervals: Sequence[DrawnInterval]) -> Sequence[DrawnInterval]:
    if len(intervals) <= MOST:
        return intervals
    first, last = intervals[0][0], max(end for _, end, _ in intervals)
    # A piece becomes two intervals at most, so there are half as many pieces.
    piece = max(1.0, (last - first) / (MOST // 2))
    # Milliseconds by piece and kind. An interval counts in every piece that it overlaps.
    taken: dict[int, dict[str, float]] = {}
    for start, end, kind in intervals:
        at = float(start)
        while at < end:
            number = int((at - first) / piece)
            until = min(float(end), first + (number + 1) * piece)
            # Rounding may put the end of a piece at or before ``at``. Then use the end of the next piece.
            until = until if until > at else at + piece
            here = taken.setdefault(number, {})
            here[kind] = here.get(kind, 0.0) + until - at
            at = until
    found: list[DrawnInterval] = []
    for number, here in sorted(taken.items()):
        # The kind with the most time represents the piece.
        kind = max(here, key=lambda each: here[each])
        start, end = round(first + number * piece), round(first + (number + 1) * piece)
        if found and found[-1][2] == kind and found[-1][1] >= start:
            found[-1] = found[-1][0], end, kind
        else:
            found.append((start, end, kind))
    return found
