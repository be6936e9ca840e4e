"""A run's topics as Arrow tables: one row per trajectory, with its fate, and one row per optimizer step.

Only surviving lineages count. A trajectory of an undone step is pending until another step trains it.
"""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from streamrl.bus.history import History
from streamrl.bus.port import message_of
from streamrl.inspection.replay.steps import StepLog, read_steps
from streamrl.inspection.trajectory_columns import FACTS, TOKENS, Place, Trained, facts_of, trained_in, trajectory_in
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, TRAJECTORIES


async def trajectory_table(history: History, run: str, algorithm: str, *, tokens: bool) -> pa.Table:
    """All trajectories that the topic holds, in order of partition and offset; undecodable records are left out.

    Raises:
        BusUnavailable: the topics cannot be read.
    """
    log = await read_steps(history, run, algorithm)
    trained = trained_in(surviving(log))
    skipped = await _skipped(history, run, algorithm, log)
    rows = []
    async for record in history.records(TRAJECTORIES.full_name(run)):
        if (trajectory := trajectory_in(record)) is not None:
            place = record.partition, record.offset
            rows.append(facts_of(trajectory, place, trained.get(place), skipped.get(place)))
            if tokens:
                rows[-1] |= {field.name: getattr(trajectory, field.name) for field in TOKENS}
    # Records ascend within a partition; partitions come as the broker delivers them.
    rows.sort(key=lambda row: (row["partition"], row["offset"]))
    # With a schema: pyarrow cannot infer a type without rows, or from a column of nulls.
    return pa.Table.from_pylist(rows, pa.schema([*FACTS, *TOKENS]) if tokens else FACTS)


async def trained_trajectories(history: History, run: str, algorithm: str) -> dict[Place, Trained]:
    """The trained trajectories by partition and offset, without those of steps that a crash undid.

    Raises:
        BusUnavailable: the topics cannot be read.
    """
    return trained_in(surviving(await read_steps(history, run, algorithm)))


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
    """A table of rows with different columns: a missing value is null. Lists and dictionaries become JSON."""
    # A dictionary keeps the order in which columns first occur; a set would not.
    columns = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [_plain(row.get(name)) for row in rows] for name in columns})


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def surviving(log: StepLog) -> list[StepReport]:
    """The reports of the surviving steps, in order; empty if nothing was trained."""
    # Without a lineage there is no chain, and ``counts`` would raise.
    if not log.lineage_starts:
        return []
    counted = {report.step: report for version, report in log.reports.items() if log.counts(version)}
    return [counted[step] for step in sorted(counted)]


async def _skipped(history: History, run: str, algorithm: str, log: StepLog) -> dict[Place, str]:
    """The reason of each record that a surviving row skips."""
    found: dict[Place, str] = {}
    async for record in history.records(SKIPS.full_name(run)):
        row = message_of(record)
        # If no lineage is known, no crash can have undone a row, and there is no chain to ask.
        if (
            isinstance(row, SkipRecord)
            and row.algorithm == algorithm
            and (not log.lineage_starts or log.counts_row(row))
        ):
            # A row for records that retention deleted unread covers a range of offsets.
            found |= {(row.partition, offset): row.reason.value for offset in range(row.offset, row.end)}
    return found
