"""Who did what and when, as lanes of stretches in milliseconds since the run began, and shares of the time."""

from collections.abc import Iterable, Sequence
from typing import Any

from deploy.reporting.gathering.gathered import Activity
from deploy.reporting.record.rows import Rows, Span
from deploy.reporting.record.run_record import RunRecord

MOST = 6000
"""Stretches of a lane; of more, what took most of each small piece of time is drawn."""
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
"""Of a run that are drawn, by name."""
Stretch = tuple[int, int, str]


def timeline(record: RunRecord) -> dict[str, Any]:
    """The trainer's lane and each worker's; empty if there is nothing to draw. ``end`` in milliseconds."""
    rows, topics = record.rows, record.gathered.topics
    workers = topics.workers if topics else {}
    lanes = [_trainer_lane(rows)] if rows.spans else []
    lanes += [_worker_lane(name, activity, rows.began) for name, activity in list(workers.items())[:WORKERS]]
    ends = [span.end - rows.began for span in rows.spans] + [rows.seconds]
    return {"lanes": lanes, "end": round(max(ends) * 1000)}


def shares(record: RunRecord) -> list[dict[str, Any]]:
    """For each process, which share of the time between the first step's begin and the last one's end it did what."""
    rows, topics = record.rows, record.gathered.topics
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


def _from_metrics(rows: Rows) -> list[Span]:
    """Where a trainer told no spans: their lengths."""
    return [Span(name, 0.0, seconds) for name in KINDS if (seconds := rows.total(f"time/{name}")) > 0]


def _parts(taken: dict[str, float], whole: float, rest: str) -> list[tuple[str, float]]:
    order = ("generate", "train", "optimizer", "publish", "checkpoint", OTHER, "wait")
    left = whole - sum(taken.values())
    taken = taken | {rest: taken.get(rest, 0.0) + max(0.0, left)}
    total = sum(taken.values())
    return [(kind, round(taken[kind] / total, 4)) for kind in order if taken.get(kind, 0.0) / total >= 0.0005]


def _trainer_lane(rows: Rows) -> dict[str, Any]:
    stretches = [_stretch(span, KINDS.get(span.kind, OTHER), rows.began) for span in rows.spans]
    return {"name": "trainer", "kinds": _by_kind(_few(stretches)), "marks": []}


def _worker_lane(name: str, activity: Activity, began: float) -> dict[str, Any]:
    stretches = [_stretch(Span("generate", *each), "generate", began) for each in activity.generating]
    marks = [[round((at - began) * 1000), version] for at, version in activity.adopted]
    return {"name": name, "kinds": _by_kind(stretches), "marks": marks}


def _stretch(span: Span, kind: str, began: float) -> Stretch:
    return round((span.start - began) * 1000), round((span.end - began) * 1000), kind


def _by_kind(stretches: Iterable[Stretch]) -> dict[str, list[int]]:
    """Start, length, start, length ... of each kind."""
    found: dict[str, list[int]] = {}
    for start, end, kind in stretches:
        if end > start:
            found.setdefault(kind, []).extend((start, end - start))
    return found


def _few(stretches: Sequence[Stretch]) -> Sequence[Stretch]:
    if len(stretches) <= MOST:
        return stretches
    first, last = stretches[0][0], max(end for _, end, _ in stretches)
    piece = max(1.0, (last - first) / (MOST // 2))
    taken: dict[int, dict[str, float]] = {}
    for start, end, kind in stretches:
        at = float(start)
        while at < end:
            number = int((at - first) / piece)
            until = min(float(end), first + (number + 1) * piece)
            until = until if until > at else at + piece
            here = taken.setdefault(number, {})
            here[kind] = here.get(kind, 0.0) + until - at
            at = until
    found: list[Stretch] = []
    for number, here in sorted(taken.items()):
        kind = max(here, key=lambda each: here[each])
        start, end = round(first + number * piece), round(first + (number + 1) * piece)
        if found and found[-1][2] == kind and found[-1][1] >= start:
            found[-1] = found[-1][0], end, kind
        else:
            found.append((start, end, kind))
    return found
