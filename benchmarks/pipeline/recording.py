"""What a run's topics and metrics say of it, what follows, and what no dispatch can beat; in emulated seconds."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.pipeline.cases import TIME_SCALE, Case
from benchmarks.pipeline.workload import recall
from streamrl.bus.history import History
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import STEPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory


class Span(NamedTuple):
    """An act of the trainer, in seconds since the epoch."""

    name: str
    start: float
    end: float


def read_spans(metrics: Path) -> list[Span]:
    """What the trainer did when, as it wrote it into ``metrics.jsonl``."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [Span(name, start, end) for row in rows for name, start, end in row.get("spans", [])]


@dataclass(frozen=True)
class Recording:
    """One row per trajectory, ordered by position; times in seconds since the epoch, of the clock that ran.

    ``prompts``: tokens of the prompt; ``trained_in``: the number of the step, -1 for none. ``reports``: the step
    reports, the one of step 0 first.
    """

    positions: NDArray[np.int64]
    workers: NDArray[np.str_]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]
    predicted: NDArray[np.int64]
    created_at: NDArray[np.float64]
    started_at: NDArray[np.float64]
    finished_at: NDArray[np.float64]
    trained_in: NDArray[np.int64]
    reports: tuple[StepReport, ...]


async def read_recording(history: History, run: str) -> Recording:
    """Read the topics of a run that has ended."""
    reports = {}
    async for record in history.records(STEPS.full_name(run)):
        if isinstance(message := record.message(), StepReport):
            reports[message.step] = message
    step_of = {group: report.step for report in reports.values() for group in report.group_ids}
    rows: list[tuple[Any, ...]] = []
    async for record in history.records(TRAJECTORIES.full_name(run)):
        one = record.message()
        assert isinstance(one, Trajectory), "the topic holds nothing else"
        rows.append(
            (
                one.position,
                one.worker_id,
                len(one.token_ids),
                len(one.prompt_token_ids),
                one.predicted_length,
                one.created_at,
                one.started_at,
                one.finished_at,
                step_of.get(one.group_id, -1),
            )
        )
    rows.sort(key=lambda row: row[0])
    types = (np.int64, np.str_, np.int64, np.int64, np.int64, np.float64, np.float64, np.float64, np.int64)
    columns: list[Any] = [np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    columns.append(tuple(reports[step] for step in sorted(reports)))
    return Recording(*columns)


@dataclass(frozen=True)
class Figures:
    """Rates and seconds of the measured steps.

    ``generation_s``: from a step's first order to its last trajectory, mean; of use in the synchronous mode.
    ``slots_busy``: share of all slots' time in which they decode; ``staleness``: the oldest trained token, in steps.
    ``recall``: of the fifth of all groups whose mean length turned out longest, the share whose told medians were.
    """

    trajectories_per_s: float
    tokens_per_s: float
    step_s: float
    generation_s: float
    slots_busy: float
    trainer_busy: float
    staleness: float
    recall: float | None


def figures(case: Case, recording: Recording) -> Figures:
    """Of ``case.steps`` steps after the first ``case.warm_up``."""
    reports = recording.reports[case.warm_up : case.warm_up + case.steps + 1]
    assert len(reports) == case.steps + 1, f"expected {case.warm_up + case.steps} steps, got {len(reports) - 1}"
    began, ended = reports[0].sent_at, reports[-1].sent_at
    seconds = (ended - began) * TIME_SCALE
    counted = np.isin(recording.trained_in, [report.step for report in reports[1:]])
    busy = occupancy(recording, began, ended, bins=2000, slots=case.workload.slots)
    trained = sum(report.metrics.get("emulated/train_s", 0.0) for report in reports[1:])
    return Figures(
        trajectories_per_s=float(counted.sum()) / seconds,
        tokens_per_s=float(recording.lengths[counted].sum()) / seconds,
        step_s=seconds / case.steps,
        generation_s=TIME_SCALE * fmean(_generated_s(recording, report.step) for report in reports[1:]),
        slots_busy=float(np.mean(list(busy.values()))) / case.workload.slots,
        trainer_busy=trained / seconds,
        staleness=max(report.metrics.get("off_policy/max", 0.0) for report in reports[1:]),
        recall=None if case.lengths == "none" else _recall(recording, counted),
    )


def occupancy(
    recording: Recording, began: float, ended: float, *, bins: int, slots: int
) -> dict[str, NDArray[np.float64]]:
    """Running completions by worker at the middle of each bin of a stretch of time.

    A completion counts from when the engine had its request; those beyond the slots wait in the engine.
    """
    moments = began + (np.arange(bins) + 0.5) * (ended - began) / bins
    found = {}
    for worker in np.unique(recording.workers):
        own = recording.workers == worker
        starts, ends = np.sort(recording.started_at[own]), np.sort(recording.finished_at[own])
        held = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
        found[str(worker)] = np.minimum(held, slots).astype(np.float64)
    return found


def _generated_s(recording: Recording, step: int) -> float:
    own = recording.trained_in == step
    return float(recording.finished_at[own].max() - recording.created_at[own].min())


def _recall(recording: Recording, counted: NDArray[np.bool_]) -> float:
    positions, groups = np.unique(recording.positions[counted], return_inverse=True)
    sizes = np.bincount(groups, minlength=len(positions))
    lengths = np.bincount(groups, recording.lengths[counted]) / sizes
    return recall(lengths, np.bincount(groups, recording.predicted[counted]) / sizes, 0.2)


def least_step_s(case: Case, recording: Recording) -> float:
    """What no dispatch can beat: the least emulated seconds of a step, from the very lengths that were sampled.

    With, of a step's completions,

    - G: their tokens at the rate of all slots busy, Σ L / Σ over workers of slots / t(slots), and their prefills;
    - A: the longest of them alone in its batch from the start, L × t(1), on the fastest worker;
    - T: forward and backward of all of them; O: the optimizer step; E: the export; W: a worker's stall to adopt;

    a step lasts at least

        synchronous        max(G, A) + T + O + E + W     one after the other
        stream             max(G, A, T) + O + E + W      training overlaps generation, new weights wait for both
        one_step_async     max(G + W, T + O + E, (W + A + O + E) / 2)
        trajectory_async   max(G + W, T + O + E, (W + A + O + E) / (η + 1))

    In the last two the stages overlap altogether. Nothing waits for a batch: a group may begin as soon as the weights
    of two steps ago (η + 1 of them, with staleness η) are there, and must have ended when its step is taken. So two
    steps, or η + 1, last at least as long as one completion. Where t is affine, slots / t(slots) grows with the slots,
    and no smaller batch has a higher rate.

    These bounds know no window: a stretch of a few steps may hold tokens that were sampled before it began.
    """
    work = case.workload
    steps = range(case.warm_up + 1, case.warm_up + case.steps + 1)
    counted = np.isin(recording.trained_in, steps)
    lengths, prompts = recording.lengths[counted], recording.prompts[counted]
    prefill_s = float(sum(map(work.curve.prefill_s, prompts.tolist()))) / sum(work.speeds)
    generate_s = (float(lengths.sum()) / work.tokens_per_s + prefill_s) / case.steps
    longest = np.mean([recording.lengths[recording.trained_in == step].max() for step in steps])
    alone_s = float(longest) * work.curve.batch_s(1) / max(work.speeds)
    train_s = work.train_s_per_token * float(lengths.sum() + prompts.sum()) / case.steps
    after_s, adopt_s = work.optimizer_s + work.export_s, work.decode.adopt_s
    match case.mode:
        case "synchronous":
            return max(generate_s, alone_s) + train_s + after_s + adopt_s
        case "stream":
            return max(generate_s, alone_s, train_s) + after_s + adopt_s
        case "one_step_async":
            overlapped = 2
        case "trajectory_async":
            overlapped = work.max_staleness + 1
    return max(generate_s + adopt_s, train_s + after_s, (adopt_s + alone_s + after_s) / overlapped)


def row_of(case: Case, recording: Recording, *, measured: bool) -> dict[str, Any]:
    """Everything but the ratio to another case."""
    found, least_s = figures(case, recording), least_step_s(case, recording)
    return {
        "workload": case.workload.name,
        "group": case.workload.group,
        "mode": case.mode,
        "dispatch": case.dispatch,
        "lengths": case.lengths,
        "measured": measured,
        "time_scale": TIME_SCALE,
        **asdict(found),
        "least_step_s": least_s,
        "of_ceiling": least_s / found.step_s,
        "warm_up": case.warm_up,
        "steps": case.steps,
    }
