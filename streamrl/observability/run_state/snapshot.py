"""A run's state as plain data, in sections that change at different rates. Independent of web and terminal."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from streamrl.observability.run_state.aggregates import Track
from streamrl.observability.run_state.figures import live_figures
from streamrl.observability.run_state.parts import Section
from streamrl.observability.run_state.state import COORDINATOR, TRAINER, RunState
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.schemas.identifiers import named_version
from streamrl.schemas.reports import Heartbeat, ResourceUsage, WorkerState

SPLIT_WINDOW_S = 60.0
STALLED_AFTER_S = 60.0


def snapshot(state: RunState, now: float) -> dict[str, Any]:
    """All sections, in a form that ``json.dumps`` accepts."""
    return {name: section(now) for name, section in sections_of(state).items()}


def sections_of(state: RunState) -> dict[str, Section]:
    """The sections by name, in the order of a snapshot; those of features follow the workers."""
    found: dict[str, Section] = {}
    for name, section in SECTIONS.items():
        found[name] = partial(section, state)
        if name == "workers":
            for part in state.parts:
                found |= part.sections
    return found


def health(state: RunState, now: float) -> str:
    """The run's health: finished, stopped, paused, draining, stalled, starting or running."""
    # The end counts first, then an operator's wish, then a guess from silence.
    if state.progress.finished:
        return "finished"
    if state.progress.ended:
        return "stopped"
    if state.progress.mode != "run":
        return {"pause": "paused", "drain": "draining"}[state.progress.mode]
    if state.progress.step_at is None:
        return "starting"
    # A run is slow, not stalled, if the trainer waits while completions arrive.
    quiet = not state.processes.rates["sampled"].per_s(now)
    return "stalled" if quiet and now - state.progress.step_at > STALLED_AFTER_S else "running"


def _loop(state: RunState, now: float) -> dict[str, Any]:
    whole = state.learning.steps.sums()
    return {
        "run": state.run,
        "algorithm": state.progress.algorithm,
        "health": health(state, now),
        "version": str(state.progress.version),
        "announced": str(state.progress.announced),
        **live_figures(state, now),
        "over": _is_over(state),
        "step_at": state.progress.step_at,
        "whole": {"trajectories": whole.trajectories, "tokens": round(whole.tokens), "seconds": round(whole.step_s, 1)},
        "skipped_by_reason": state.skipped,
        "metrics": {key: state.metrics[key] for key in SHOWN_METRICS if key in state.metrics},
    }


SHOWN_METRICS = (
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "mismatch_kl/all/mean",
    "clip_ratio/region_mean",
    "time/train_share",
    "padding/all",
    "time/step",
    "time/forward_backward",
    "perf/mfu",
    "perf/limit_tok/s",
    "perf/matmul_tflops",
)
"""Metrics of the newest step to show, under TRL's names; without those that have a name among the figures."""


def _is_over(state: RunState) -> bool:
    return state.progress.finished or state.progress.ended


def _lag(state: RunState, _now: float) -> dict[str, Any]:
    lag = state.lag
    buckets = sorted({*lag, *state.trajectories.buckets})
    return {
        "buckets": buckets,
        "lag": [lag.get(bucket, 0) for bucket in buckets],
    }


def _workers(state: RunState, now: float) -> list[dict[str, Any]]:
    return [_worker(state, beat, now) for _, beat in sorted(state.processes.workers.items())]


def _worker(state: RunState, beat: Heartbeat, now: float) -> dict[str, Any]:
    found = {
        "id": beat.worker_id,
        "state": "silent" if beat.worker_id in state.processes.silent else beat.state.value,
        "version": beat.weights,
        "behind": 0 if beat.policy else max(0, state.progress.announced.number - beat.version.number),
        "running": beat.running,
        "waiting": beat.waiting,
        "capacity": beat.capacity,
        "tokens_per_s": round(beat.tokens_per_s),
        "age": round(max(0.0, now - beat.sent_at)),
    }
    # The run may have ended before the worker's last heartbeat said so, or without one.
    ended = {"state": WorkerState.STOPPED.value, "behind": 0, "running": 0, "waiting": 0, "tokens_per_s": 0}
    return found | (ended if _is_over(state) else {})


def _split(state: RunState, now: float) -> list[dict[str, Any]]:
    """For each process, the shares of its activities in the last minute; time outside all intervals is waiting."""
    # Up to the newest interval, not now: a step is reported only when it is over, and would look like waiting.
    ends = [track.intervals[-1].end for track in state.processes.tracks.values() if track.intervals]
    until = min(now, max(ends, default=now))
    rows = []
    for name in _ordered_tracks(state):
        track = state.processes.tracks[name]
        if name == COORDINATOR or not track.intervals:
            continue
        # If a process started within the minute, since its start.
        since = max(until - SPLIT_WINDOW_S, track.intervals[0].start)
        span = max(until - since, 1e-6)  # not 0 for a track that started just now
        shares = {kind: round(taken / span, 4) for kind, taken in track.seconds(since, until).items() if kind != "wait"}
        rows.append({"name": name, "shares": shares, "wait": round(max(0.0, 1 - sum(shares.values())), 4)})
    return rows


def _curves(state: RunState, _now: float) -> dict[str, Any]:
    return {
        **state.learning.curves.columns(),
        "stride": state.learning.curves.stride,
        # Evaluations have their own, few steps.
        "evaluations": state.learning.evaluations.columns(),
        "marks": [[mark.step, round(mark.at, 3), mark.kind, mark.text] for mark in state.log.marks],
    }


def _lengths(state: RunState, _now: float) -> dict[str, Any]:
    found = state.trajectories.calibration
    return {
        "cells": [[*cell, round(count)] for cell, count in sorted(found.cells.items())],
        "close": None if found.close_share is None else round(found.close_share, 3),
        "factor": None if found.typical_factor is None else round(found.typical_factor, 2),
    }


def _staleness(state: RunState, _now: float) -> dict[str, Any]:
    return {"counts": [[age, round(count)] for age, count in sorted(state.trajectories.staleness.counts.items())]}


def _timeline(state: RunState, _now: float) -> list[dict[str, Any]]:
    return [{"name": name, **_drawn(state.processes.tracks[name])} for name in _ordered_tracks(state)]


def _drawn(track: Track) -> dict[str, Any]:
    return {
        "stretches": [[round(each.start, 3), round(each.end, 3), each.kind, each.tag] for each in track.intervals],
        "marks": [[round(mark.at, 3), mark.kind, mark.text] for mark in track.marks],
    }


def _ordered_tracks(state: RunState) -> list[str]:
    # Trainer and coordinator first, since they are always there; workers come and go below them.
    first = {TRAINER: 0, COORDINATOR: 1}
    return sorted(state.processes.tracks, key=lambda name: (first.get(name, 2), name))


def _trajectories(state: RunState, _now: float) -> list[dict[str, Any]]:
    return [_row(state, summary) for summary in state.trajectories.listed()]


def _row(state: RunState, summary: TrajectorySummary) -> dict[str, Any]:
    position = summary.partition, summary.offset
    return {
        "id": summary.trajectory_id,
        # Of an ended run some texts were kept, without their places.
        "place": summary.trajectory_id if summary.partition < 0 else f"{summary.partition}@{summary.offset}",
        "worker": summary.worker_id,
        "bucket": summary.bucket,
        "length": summary.length,
        "predicted": summary.predicted,
        "reward": None if summary.reward is None else round(summary.reward, 4),
        # As text: JSON has no pairs of numbers.
        "versions": [
            named_version(summary.policy or None, one) for one in dict.fromkeys((summary.oldest, summary.newest))
        ],
        "finish": summary.finish_reason,
        "text": summary.completion,
        "seconds": round(summary.finished_at - summary.started_at, 3),
        "at": round(summary.finished_at, 3),
        "fate": state.trajectories.fates.of(position, over=_is_over(state)),
    }


def _rewards(state: RunState, _now: float) -> dict[str, Any]:
    recent, difficulty = state.trajectories.rewards.recent, state.trajectories.rewards.by_prompt
    return {
        "trajectories": len(recent.newest),
        "bars": recent.bars(),
        "prompts": difficulty.counts(),
        "hardest": [[name, round(each.mean, 4), each.solved, each.samples] for name, each in difficulty.hardest()],
    }


def _usage(state: RunState, now: float) -> dict[str, Any]:
    """What processes and machines use, by the newest reports of those that are alive."""
    if _is_over(state):
        return {"processes": [], "machines": []}
    found = {beat.worker_id: beat.usage for beat in state.living_workers(now) if beat.usage is not None}
    if state.processes.trainer is not None:
        found = {TRAINER: state.processes.trainer, **found}
    # Every process reports its machine and its GPUs; of several on one, the last report counts.
    machines = {usage.host: usage for usage in found.values()}
    return {
        "processes": [[name, each.host, each.cores_used, each.memory_bytes] for name, each in found.items()],
        "machines": [_machine(machines[host], found.values()) for host in sorted(machines)],
    }


def _machine(machine: ResourceUsage, all_usage: Iterable[ResourceUsage]) -> dict[str, Any]:
    here = [usage for usage in all_usage if usage.host == machine.host]
    known = [usage.gpus for usage in here if usage.gpus is not None]
    # Processes that share a GPU both report it.
    gpus = {gpu.gpu_id: gpu for each in known for gpu in each}.values()
    return {
        "host": machine.host,
        "cores": machine.machine_cores,
        "busy": machine.machine_busy,
        "used": machine.machine_used_bytes,
        "total": machine.machine_bytes,
        "gpus": [[gpu.name, gpu.busy, gpu.used_bytes, gpu.total_bytes] for gpu in gpus] if known else None,
    }


def _events(state: RunState, _now: float) -> list[list[Any]]:
    return [[event.number, round(event.at, 3), event.level, event.text, event.times] for event in state.log.events]


SECTIONS: dict[str, Callable[[RunState, float], Any]] = {
    "loop": _loop,
    "lag": _lag,
    "workers": _workers,
    "split": _split,
    "curves": _curves,
    "lengths": _lengths,
    "staleness": _staleness,
    "timeline": _timeline,
    "rewards": _rewards,
    "usage": _usage,
    "trajectories": _trajectories,
    "events": _events,
}
