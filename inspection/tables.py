"""A run's topics as Arrow tables: one row a trajectory with what became of it, one row an optimizer step.

Only the lineage that survives counts: a trajectory that an undone step had trained is trained by the step that took it
again, or pending.
"""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from bus.history import History
from bus.port import Record, message_of
from inspection.replay.steps import StepLog, read_steps
from schemas.reports import SkipRecord, StepReport
from schemas.topics import SKIPS, TRAJECTORIES
from schemas.trajectories import Trajectory

FACTS = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("dataset", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("length", pa.int32()),
        ("predicted_length", pa.int32()),
        ("bucket", pa.int32()),
        ("finish_reason", pa.string()),
        ("oldest_version", pa.string()),
        ("newest_version", pa.string()),
        ("worker_id", pa.string()),
        ("attempt", pa.int32()),
        ("created_at", pa.float64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("step", pa.int64()),
        ("skip_reason", pa.string()),
    ]
)
"""Lengths in tokens, times in seconds since the epoch; ``step`` and ``skip_reason`` both null: pending."""
TOKENS = (
    pa.field("prompt_token_ids", pa.list_(pa.int32())),
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("logprobs", pa.list_(pa.float32())),
    pa.field("loss_mask", pa.list_(pa.uint8())),
)
"""``token_ids``, ``logprobs`` (nats, of the behaviour policy) and ``loss_mask`` are of one length, the completion's."""
NOT_IN_THE_RECORD = frozenset({"partition", "offset", "step", "skip_reason"})
"""Columns of where a record stands, and of what became of it, which other topics tell."""
Place = tuple[int, int]
"""Partition and offset on the trajectories topic."""


async def trajectory_table(history: History, run: str, algorithm: str, *, tokens: bool) -> pa.Table:
    """All trajectories that the topic holds, in order of partition and offset; undecodable records are left out.

    Raises:
        BusUnavailable: the topics cannot be read.
    """
    log = await read_steps(history, run, algorithm)
    # Without those that a step left out: they only counted for its advantages, and a skip row says so.
    trained = {(ref.partition, ref.offset): report.step for report in surviving(log) for ref in report.trained_refs}
    skipped = await _skipped(history, run, algorithm, log)
    rows = []
    async for record in history.records(TRAJECTORIES.full_name(run)):
        if (trajectory := _trajectory(record)) is not None:
            place = record.partition, record.offset
            rows.append(_facts(trajectory, place, trained.get(place), skipped.get(place)))
            if tokens:
                rows[-1] |= {field.name: getattr(trajectory, field.name) for field in TOKENS}
    # Records ascend within a partition; partitions come as the broker delivers them.
    rows.sort(key=lambda row: (row["partition"], row["offset"]))
    # By a schema rather than by what is in the rows: no row, or a column of nulls, tells no type.
    return pa.Table.from_pylist(rows, pa.schema([*FACTS, *TOKENS]) if tokens else FACTS)


def readable_columns(records: Sequence[Record]) -> dict[str, pa.Array]:
    """What trajectories say of themselves, tokens included, a row a record; null where none is."""
    rows: list[dict[str, Any]] = []
    for record in records:
        one = _trajectory(record)
        found = {} if one is None else _facts(one, (record.partition, record.offset), None, None)
        rows.append(found if one is None else found | {field.name: getattr(one, field.name) for field in TOKENS})
    return {
        field.name: pa.array([row.get(field.name) for row in rows], field.type)
        for field in (*FACTS, *TOKENS)
        if field.name not in NOT_IN_THE_RECORD
    }


async def step_table(history: History, run: str, algorithm: str) -> pa.Table:
    """The surviving optimizer steps in order: step, version, groups, trajectories, time, and each metric as a column.

    Raises:
        BusUnavailable: the topics cannot be read.
    """
    reports = surviving(await read_steps(history, run, algorithm))
    rows = [
        {
            "step": report.step,
            "version": str(report.version),
            "groups": len(report.group_ids),
            "trajectories": len(report.trained_refs),
            "sent_at": report.sent_at,
            **report.metrics,
        }
        for report in reports
    ]
    return table_of(rows)


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows of which each may lack a column that another one has: null there. What is no plain value becomes JSON."""
    # All columns of any row in the order in which they first occur, which a set would not keep.
    columns = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [_plain(row.get(name)) for row in rows] for name in columns})


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def surviving(log: StepLog) -> list[StepReport]:
    """The reports of the steps that no crash has undone, in order; none if nothing was trained."""
    # Without a lineage there is no chain, and asking for it is an error.
    if not log.lineage_starts:
        return []
    counted = {report.step: report for version, report in log.reports.items() if log.counts(version)}
    return [counted[step] for step in sorted(counted)]


async def _skipped(history: History, run: str, algorithm: str, log: StepLog) -> dict[Place, str]:
    """The reason of each record that a surviving row skips."""
    found: dict[Place, str] = {}
    async for record in history.records(SKIPS.full_name(run)):
        row = message_of(record)
        # While no lineage is known, no crash can have undone a row, and there is no chain to ask.
        if (
            isinstance(row, SkipRecord)
            and row.algorithm == algorithm
            and (not log.lineage_starts or log.counts_row(row))
        ):
            # A row for records that retention deleted unread stands for a whole range of offsets.
            end = row.offset + 1 if row.end_offset is None else row.end_offset
            found |= {(row.partition, offset): row.reason.value for offset in range(row.offset, end)}
    return found


def _trajectory(record: Record) -> Trajectory | None:
    message = message_of(record)
    return message if isinstance(message, Trajectory) else None


def _facts(one: Trajectory, place: Place, step: int | None, skip_reason: str | None) -> dict[str, Any]:
    partition, offset = place
    return {
        "trajectory_id": one.trajectory_id,
        "group_id": one.group_id,
        "prompt_id": one.prompt_id,
        "dataset": one.dataset,
        "sample_index": one.sample_index,
        "prompt": one.prompt_text,
        "completion": one.completion_text,
        # Arrow builds a value of a map type from pairs.
        "rewards": list(one.rewards.items()),
        "length": len(one.token_ids),
        "predicted_length": one.predicted_length,
        "bucket": one.bucket,
        "finish_reason": one.finish_reason.value,
        "oldest_version": str(one.oldest_version),
        "newest_version": str(one.newest_version),
        "worker_id": one.worker_id,
        "attempt": one.attempt,
        "created_at": one.created_at,
        "started_at": one.started_at,
        "finished_at": one.finished_at,
        "partition": partition,
        "offset": offset,
        "step": step,
        "skip_reason": skip_reason,
    }
