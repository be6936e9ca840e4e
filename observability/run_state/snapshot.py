"""A live state as plain data, in sections that change at different speeds. Knows no web and no terminal."""

from collections.abc import Callable
from typing import Any

from observability.run_state.aggregates import Lane, Sketch
from observability.run_state.observer import SILENT_AFTER_S, lag_by_bucket
from observability.run_state.state import COORDINATOR, TRAINER, LiveState
from schemas.reports import Heartbeat, WorkerState

SPLIT_WINDOW_S = 60.0
STALLED_AFTER_S = 60.0


def snapshot(state: LiveState, now: float) -> dict[str, Any]:
    """All sections; ``json.dumps`` takes it."""
    return {name: section(state, now) for name, section in SECTIONS.items()}


def health(state: LiveState, now: float) -> str:
    """finished, paused, draining, stalled, starting or running."""
    if state.finished:
        return "finished"
    if state.mode != "run":
        return {"pause": "paused", "drain": "draining"}[state.mode]
    if state.step_at is None:
        return "starting"
    quiet = not state.rates["trajectories"].per_s(now)
    return "stalled" if quiet and now - state.step_at > STALLED_AFTER_S else "running"


def _loop(state: LiveState, now: float) -> dict[str, Any]:
    alive = [beat for beat in state.workers.values() if _alive(beat, now)]
    per_s = {name: round(rate.per_s(now), 2) for name, rate in state.rates.items()}
    return {
        "run": state.run,
        "algorithm": state.algorithm,
        "health": health(state, now),
        "step": state.step,
        "version": str(state.version),
        "announced": str(state.announced),
        "step_age": None if state.step_at is None else round(now - state.step_at, 1),
        "rates": per_s,
        "totals": {name: round(rate.total) for name, rate in state.rates.items()},
        "workers": len(alive),
        "running": sum(beat.running for beat in alive),
        "waiting": sum(beat.waiting for beat in alive),
        "capacity": sum(beat.capacity for beat in alive),
        "engine_tokens_per_s": round(sum(beat.tokens_per_s for beat in alive)),
        "skips": dict(state.skips),
        "metrics": {key: state.metrics[key] for key in SHOWN_METRICS if key in state.metrics},
    }


SHOWN_METRICS = ("reward", "off_policy/mean", "off_policy/max", "time/train_share", "padding/all", "time/step")


def _lag(state: LiveState, _now: float) -> dict[str, Any]:
    unread = lag_by_bucket(state.metrics)
    buckets = sorted({*unread, *state.unfinished, *state.buckets})
    return {
        "buckets": buckets,
        "unread": [unread.get(bucket, 0) for bucket in buckets],
        "unfinished": [state.unfinished.get(bucket) for bucket in buckets],
        "seen": [state.buckets.get(bucket, 0) for bucket in buckets],
    }


def _workers(state: LiveState, now: float) -> list[dict[str, Any]]:
    return [
        {
            "id": worker,
            "state": "silent" if worker in state.silent else beat.state.value,
            "version": str(beat.version),
            "behind": max(0, state.announced.number - beat.version.number),
            "running": beat.running,
            "waiting": beat.waiting,
            "capacity": beat.capacity,
            "tokens_per_s": round(beat.tokens_per_s),
            "age": round(max(0.0, now - beat.sent_at)),
        }
        for worker, beat in sorted(state.workers.items())
    ]


def _alive(beat: Heartbeat, now: float) -> bool:
    return beat.state is not WorkerState.STOPPED and now - beat.sent_at <= SILENT_AFTER_S


def _split(state: LiveState, now: float) -> list[dict[str, Any]]:
    """Shares of the last minute, for each process; what no stretch says is waiting."""
    ends = [lane.stretches[-1].end for lane in state.lanes.values() if lane.stretches]
    until = min(now, max(ends, default=now))
    rows = []
    for name in _ordered_lanes(state):
        lane = state.lanes[name]
        if name == COORDINATOR or not lane.stretches:
            continue
        since = max(until - SPLIT_WINDOW_S, lane.stretches[0].start)
        span = max(until - since, 1e-6)
        shares = {kind: round(taken / span, 4) for kind, taken in lane.seconds(since, until).items() if kind != "wait"}
        rows.append({"name": name, "shares": shares, "wait": round(max(0.0, 1 - sum(shares.values())), 4)})
    return rows


def _curves(state: LiveState, _now: float) -> dict[str, Any]:
    return {**state.curves.columns(), "stride": state.curves.stride}


def _lengths(state: LiveState, _now: float) -> dict[str, Any]:
    found = state.calibration
    return {
        "cells": [[*cell, round(count)] for cell, count in sorted(found.cells.items())],
        "close": None if found.close_share is None else round(found.close_share, 3),
        "factor": None if found.typical_factor is None else round(found.typical_factor, 2),
    }


def _staleness(state: LiveState, _now: float) -> dict[str, Any]:
    return {"counts": [[age, round(count)] for age, count in sorted(state.staleness.counts.items())]}


def _timeline(state: LiveState, _now: float) -> list[dict[str, Any]]:
    return [{"name": name, **_drawn(state.lanes[name])} for name in _ordered_lanes(state)]


def _drawn(lane: Lane) -> dict[str, Any]:
    return {
        "stretches": [[round(s.start, 3), round(s.end, 3), s.kind, s.tag] for s in lane.stretches],
        "marks": [[round(mark.at, 3), mark.kind, mark.text] for mark in lane.marks],
    }


def _ordered_lanes(state: LiveState) -> list[str]:
    first = {TRAINER: 0, COORDINATOR: 1}
    return sorted(state.lanes, key=lambda name: (first.get(name, 2), name))


def _trajectories(state: LiveState, _now: float) -> list[dict[str, Any]]:
    return [_row(state, sketch) for sketch in reversed(state.last)]


def _row(state: LiveState, sketch: Sketch) -> dict[str, Any]:
    place = sketch.partition, sketch.offset
    return {
        "id": sketch.trajectory_id,
        "place": f"{sketch.partition}@{sketch.offset}",
        "worker": sketch.worker_id,
        "bucket": sketch.bucket,
        "length": sketch.length,
        "predicted": sketch.predicted,
        "reward": None if sketch.reward is None else round(sketch.reward, 4),
        "versions": sorted({str(sketch.oldest), str(sketch.newest)}),
        "finish": sketch.finish_reason,
        "text": sketch.completion,
        "seconds": round(sketch.finished_at - sketch.started_at, 3),
        "at": round(sketch.finished_at, 3),
        "fate": state.fates.of(place, over=state.finished),
    }


def _events(state: LiveState, _now: float) -> list[list[Any]]:
    return [[event.number, round(event.at, 3), event.level, event.text, event.times] for event in state.log.events]


SECTIONS: dict[str, Callable[[LiveState, float], Any]] = {
    "loop": _loop,
    "lag": _lag,
    "workers": _workers,
    "split": _split,
    "curves": _curves,
    "lengths": _lengths,
    "staleness": _staleness,
    "timeline": _timeline,
    "trajectories": _trajectories,
    "events": _events,
}
