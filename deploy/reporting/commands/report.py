"""`streamrl report`: writes a run's page again, or one page that compares runs. Starts nothing unless asked to."""

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.inspection.source import PastRun, history_of, open_run
from deploy.reporting.commands.finding import find_runs, names_of
from deploy.reporting.drawing.tables import differing_settings, figure_rows
from deploy.reporting.gathering.gathered import TopicFacts, write_gathered
from deploy.reporting.gathering.topics import gather_topics
from deploy.reporting.page import level_for, write_page
from deploy.reporting.record.figures import figures_of
from deploy.reporting.record.run_record import RunRecord, read_record
from deploy.runs.directory import RunDirectory
from schemas.errors import UserError
from schemas.ports.history import History

COMPARISON = Path("comparison.html")


def report(
    paths: Sequence[Path],
    out: Path | None,
    level: float | None,
    *,
    as_json: bool,
    from_topics: bool,
    export: Path | None,
) -> int:
    """Write the page, or print the figures as JSON (both if ``out`` is named). The exit code is 0.

    Raises:
        UserError: a run is not there, took no step, or the page cannot be written.
    """
    if level is not None and not math.isfinite(level):
        raise UserError(f"expected a number after --reward, got {level}")
    if export is not None and len(paths) > 1:
        raise UserError(f"expected one run with --export, whose topics it holds, got {len(paths)} runs")
    directories = find_runs(paths)
    names = names_of([directory.path for directory in directories])
    if from_topics or export is not None:
        for directory in directories:
            _gather_again(directory, export)
    records = [read_record(directory, name) for directory, name in zip(directories, names, strict=True)]
    _refuse_empty(records)
    if as_json:
        print(json.dumps(as_data(records, level), indent=2))
    if out is not None or not as_json:
        target = out or (directories[0].report if len(records) == 1 else COMPARISON)
        _write(target, records, level)
        print(f"report: {target}", file=sys.stderr if as_json else sys.stdout)
    return 0


def as_data(records: Sequence[RunRecord], level: float | None = None) -> dict[str, Any]:
    """Figures of each run and the settings that differ, as plain data; shares are 0 to 1, times in seconds."""
    level = level_for(records, level)
    rows = figure_rows([figures_of(record, level) for record in records])
    return {
        "reward_level": level,
        "runs": [
            {"name": record.name, "path": str(record.path), "figures": {row.key: row.values[number] for row in rows}}
            for number, record in enumerate(records)
        ],
        "settings": {key: [record.settings.get(key) for record in records] for key, _ in differing_settings(records)},
    }


def _refuse_empty(records: Sequence[RunRecord]) -> None:
    for record in records:
        if not record.rows.steps:
            raise UserError(f"expected at least one whole step in {record.path}/metrics.jsonl, got none")


def _write(target: Path, records: Sequence[RunRecord], level: float | None) -> None:
    try:
        write_page(target, records, level)
    except OSError as error:
        raise UserError(f"expected to write the report to {target}, got: {error.strerror}") from error


def _gather_again(directory: RunDirectory, export: Path | None) -> None:
    """Read the run's topics once more and keep what they tell; the environment and samples of its end stay."""
    run = open_run(directory.path)
    known = read_record(directory, run.name).gathered
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-report-") as scratch,
        history_of(run, export, Path(scratch), lambda text: print(text, file=sys.stderr)) as history,
    ):
        topics = asyncio.run(_gathered(history, run))
    if topics is None:
        raise UserError(f"expected trajectories of run {run.name} on its topics, got none")
    write_gathered(directory.gathered, known.model_copy(update={"topics": topics}))


async def _gathered(history: History, run: PastRun) -> TopicFacts | None:
    try:
        return await gather_topics(history, run.name, run.directory.logs)
    finally:
        await history.close()
