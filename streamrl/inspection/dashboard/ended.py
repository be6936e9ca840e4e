"""The state of a run that has ended, from the files in its directory. Starts no broker and reads no topic."""

import bisect
from collections.abc import Mapping, Sequence

from streamrl.bus.port import TopicPartition
from streamrl.inspection.report.record import RunRecord, SampleText, StepTable, TopicDigest, read_record
from streamrl.inspection.source import PastRun, is_over
from streamrl.observability.run_state.aggregates import StepEntry
from streamrl.observability.run_state.feed import ends_by_bucket
from streamrl.observability.run_state.state import (
    FINISHED_PREFIX,
    PHASES,
    TRAINER,
    RunState,
    by_bucket,
    by_reason,
)
from streamrl.observability.run_state.trajectory_summary import PREVIEW, TrajectorySummary
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.starts import RunStart
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import total_reward
from streamrl.settings.features import run_parts

KINDS = {name.removeprefix("time/"): kind for kind, name in PHASES}
"""Kinds of the trainer's intervals in a timeline, by the names of phases in ``metrics.jsonl``."""
LINEAGE = 1
"""Lineage of all versions here: the files name weights by their step."""
NOT_KEPT = -1
"""Partition and offset of a trajectory whose record was not kept, only its text."""


def ended_state(past: PastRun) -> RunState:
    """The run as its files have it: steps, evaluations, timelines, some trajectories, its starts and its end.

    Raises:
        DataError: a file exists but cannot be read.
    """
    record = read_record(past.directory, past.name)
    weights, stall_s = past.settings.rewards.weight_by_name, past.settings.run.stall_s
    state = RunState(past.name, weights, run_parts(past.name), stall_s)
    state.progress.algorithm = past.settings.algorithm.name
    state.progress.planned_steps = past.settings.training.max_steps
    _fill_steps(state, record.rows, record.starts)
    if record.facts.topics is not None:
        _fill_topics(state, record.facts.topics, record.rows)
    _fill_end(state, record)
    return state


def _fill_steps(state: RunState, rows: StepTable, starts: Sequence[RunStart]) -> None:
    waiting = [start for start in starts if start.is_marked]
    state.learning.evaluations.rows = [(PolicyVersion(LINEAGE, step), metrics) for step, metrics in rows.evaluations]
    for step, seconds, metrics in zip(rows.steps, rows.times, rows.metrics, strict=True):
        at = rows.began + seconds
        while waiting and waiting[0].at <= at:
            text, kind = waiting[0].mark()
            state.log.add(waiting.pop(0).at, "info", text, mark=kind)
        trajectories = round(metrics.get("ledger/trained", 0.0))
        state.take_step(StepEntry(step, PolicyVersion(LINEAGE, step), at, trajectories, metrics))
    if rows.metrics:
        state.refusals.skips.report(LINEAGE, rows.began + rows.seconds, by_reason(rows.metrics[-1]))
    track, ends = state.track(TRAINER), [rows.began + seconds for seconds in rows.times]
    for span in rows.spans:
        step = rows.steps[min(bisect.bisect_left(ends, span.end), len(rows.steps) - 1)]
        track.extend(span.start, span.end, KINDS.get(span.kind, "other"), step)


def _fill_topics(state: RunState, topics: TopicDigest, rows: StepTable) -> None:
    trajectories = state.trajectories
    buckets = len(by_bucket(state.metrics, FINISHED_PREFIX))
    if buckets and topics.ends:
        ends = {TopicPartition(TRAJECTORIES.name, partition): end for partition, end in topics.ends.items()}
        trajectories.ends = ends_by_bucket(ends, len(ends) // buckets)
    trajectories.staleness.counts = {age: float(count) for age, count in topics.staleness.items()}
    trajectories.calibration.cells = {
        (predicted, actual): float(count)
        for predicted, actual, count in (topics.lengths.cells if topics.lengths is not None else ())
    }
    for name, worker in topics.workers.items():
        track, adopted = state.track(name), list(worker.adopted)
        times = [at for at, _ in adopted]
        for start, end in worker.generating:
            track.extend(start, end, "generate", bisect.bisect_right(times, start))
        for at, version in adopted:
            track.mark(at, "adopt", f"weights {version}")
    ended_at = rows.began + rows.seconds
    trajectories.last.extend(_summary(sample, ended_at, state.reward_weights) for sample in topics.last)


def _summary(sample: SampleText, at: float, weights: Mapping[str, float]) -> TrajectorySummary:
    newest = sample.versions[-1] if sample.versions else ""
    # An arm's version also has the arm's name, as in ``rloo/1-7``.
    number = newest.rpartition("/")[2].rpartition("-")[2]
    version = PolicyVersion(LINEAGE, int(number) if number.isdecimal() else 0)
    return TrajectorySummary(
        trajectory_id=sample.trajectory_id,
        group_id=sample.trajectory_id.rpartition("/")[0],
        worker_id=sample.worker,
        bucket=0,
        predicted=sample.predicted,
        length=sample.tokens,
        reward=total_reward(sample.rewards, weights),
        oldest=version,
        newest=version,
        finish_reason="",
        completion=sample.completion[:PREVIEW],
        started_at=at,
        finished_at=at,
        partition=NOT_KEPT,
        offset=NOT_KEPT,
        policy="",
        aged_from=version.number,
        solved=False,
    )


def _fill_end(state: RunState, record: RunRecord) -> None:
    progress, rows = state.progress, record.rows
    progress.ended = True
    if is_over(record.summary, progress.step, state.max_steps):
        progress.finished, progress.finished_step = True, progress.step
    if rows.steps:
        word = "finished" if progress.finished else "stopped"
        level = "good" if progress.finished else "warn"
        state.log.add(rows.began + rows.seconds, level, f"the run {word} at step {progress.step}")
