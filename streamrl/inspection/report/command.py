"""`streamrl report`: writes a run's page again, or one page that compares runs.

It reads topics, and may start a broker for that, only with --from-topics or --export.
"""

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrl.bus.history import History
from streamrl.inspection.report.figures import figures_of
from streamrl.inspection.report.gathering import gather_topics
from streamrl.inspection.report.page import differing_settings, figure_rows, level_for, write_page
from streamrl.inspection.report.pairing import paired_differences
from streamrl.inspection.report.record import RunRecord, TopicDigest, read_record, write_facts
from streamrl.inspection.source import RUNS, PastRun, describe_missing_run, history_of, open_run
from streamrl.schemas.errors import UserError
from streamrl.schemas.extras import require_extra
from streamrl.schemas.plain_text import plain_text
from streamrl.settings.run_directory import RunDirectory

COMPARISON = Path("comparison.html")
WIDTH = 160
"""Characters in a line of the table where standard output is not a terminal."""


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
        UserError: there is no such run, it has no step, or the page cannot be written.
    """
    # Python accepts "nan" and "inf" as numbers, but no reward can reach them.
    if level is not None and not math.isfinite(level):
        raise UserError(f"expected a number after --reward, got {level}")
    if export is not None and len(paths) > 1:
        raise UserError(f"expected one run with --export, which holds one run's topics, got {len(paths)} runs")
    # Find all runs before reading topics, which takes long: a wrong name must fail at once.
    directories = find_runs(paths)
    _check_comparison(directories)
    names = names_of([directory.path for directory in directories])
    if from_topics or export is not None:
        for directory in directories:
            _gather_again(directory, export)
    records = _records_of(directories, names)
    if as_json:
        print(json.dumps(as_data(records, level), indent=2))
    elif len(records) > 1:
        print_comparison(records, level)
    if out is not None or not as_json:
        target = out or (directories[0].report if len(records) == 1 else COMPARISON)
        _write(target, records, level)
        # With JSON, standard output has only the JSON.
        print(f"report: {target}", file=sys.stderr if as_json else sys.stdout)
    return 0


def compared(paths: Sequence[Path], level: float | None = None, out: Path | None = None) -> dict[str, Any]:
    """``as_data`` of these runs. Also writes the page if ``out`` is named.

    Raises:
        UserError: there is no such run, it has no step, or the page cannot be written.
    """
    directories = find_runs(paths)
    _check_comparison(directories)
    records = _records_of(directories, names_of([directory.path for directory in directories]))
    if out is not None:
        _write(out, records, level)
    return as_data(records, level)


def as_data(records: Sequence[RunRecord], level: float | None = None) -> dict[str, Any]:
    """Figures of each run, their differences on paired prompts, and the settings that differ, as plain data.

    Shares are from 0 to 1, times in seconds.
    """
    level = level_for(records, level)
    rows = figure_rows([figures_of(record, level) for record in records])
    return {
        "reward_level": level,
        "runs": [
            {"name": record.name, "path": str(record.path), "figures": {row.key: row.values[number] for row in rows}}
            for number, record in enumerate(records)
        ],
        "paired": [each._asdict() | {"significant": each.is_significant} for each in paired_differences(records)],
        "settings": {key: [record.settings.get(key) for record in records] for key, _ in differing_settings(records)},
    }


def print_comparison(records: Sequence[RunRecord], level: float | None = None) -> None:
    """Print the figures of several runs side by side, the best of each row in bold, then the paired differences."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for record in records:
        table.add_column(Text(plain_text(record.name)), justify="right", overflow="fold")
    level = level_for(records, level)
    for row in figure_rows([figures_of(record, level) for record in records]):
        cells = (Text(plain_text(text), "bold" if best else "") for text, best in zip(row.texts, row.best, strict=True))
        table.add_row(Text(plain_text(row.label)), *cells)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    for each in paired_differences(records):
        console.print(Text(plain_text(each.text)))


def _check_comparison(directories: Sequence[RunDirectory]) -> None:
    """Check that the library for the comparison of several runs is installed."""
    if len(directories) > 1:
        require_extra("inspect", "comparing runs", "scipy")


def _records_of(directories: Sequence[RunDirectory], names: Sequence[str]) -> list[RunRecord]:
    records = [read_record(directory, name) for directory, name in zip(directories, names, strict=True)]
    for record in records:
        if not record.rows.steps:
            raise UserError(f"expected at least one complete step in {record.path}/metrics.jsonl, found none")
    return records


def _write(target: Path, records: Sequence[RunRecord], level: float | None) -> None:
    try:
        write_page(target, records, level)
    except OSError as error:
        raise UserError(f"expected to write the report to {target}, got: {error.strerror}") from error


def _gather_again(directory: RunDirectory, export: Path | None) -> None:
    """Read the run's topics again and save the result. The saved environment and evaluation samples are kept."""
    run = open_run(directory.path)
    known = read_record(directory, run.name).facts
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-report-") as scratch,
        history_of(run, export, Path(scratch), lambda text: print(text, file=sys.stderr)) as history,
    ):
        topics = asyncio.run(_gathered(history, run))
    if topics is None:
        raise UserError(f"expected trajectories of run {run.name} on its topics, found none")
    write_facts(directory.gathered, known.model_copy(update={"topics": topics}))


async def _gathered(history: History, run: PastRun) -> TopicDigest | None:
    try:
        return await gather_topics(history, run.name, run.directory.logs, run.settings.rewards.weight_by_name)
    finally:
        await history.close()  # within the event loop that its connections belong to


def find_runs(paths: Sequence[Path]) -> list[RunDirectory]:
    """The runs at these paths. A run has settings or metrics; a report needs the metrics.

    Raises:
        UserError: some paths are no runs, or their runs have no step yet. The message names each.
    """
    # Problems are collected, so that the message names all wrong paths.
    found, problems = [], []
    for path in paths:
        try:
            found.append(find_run(path))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; and ".join(problems))
    return found


def find_run(path: Path) -> RunDirectory:
    """A run by its directory, its name under ``runs/``, or a file in its directory.

    Raises:
        UserError: there is no such run, or it has no step yet.
    """
    given = path.parent if path.is_file() else path
    # An existing directory is preferred to a run of the same name.
    candidates = [given] if given.is_dir() else [RUNS / given]
    for candidate in map(RunDirectory, candidates):
        if candidate.metrics.is_file():
            return candidate
        if candidate.config.is_file():
            raise UserError(
                f"expected {candidate.metrics.name} in {candidate.path}, which the trainer writes with its first step, "
                "found none yet; `streamrl status` shows the run's state"
            )
    if given.is_dir():
        name = RunDirectory(given).config.name
        raise UserError(f"expected a run's directory, with {name}, got {describe_missing_run(given)}")
    raise UserError(f"expected a run's directory or its name under {RUNS}/, got {describe_missing_run(path)}")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Last parts of the paths; if these are not unique, as many more parts as needed."""
    # ``abspath`` rather than ``resolve``: a link's own name is the run's name.
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"expected different runs, got {paths[0]} twice")
