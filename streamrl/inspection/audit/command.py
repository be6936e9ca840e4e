"""`streamrl audit` and `streamrl export`: find the run, open its history, show progress, print, give an exit code."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from streamrl.bus.history import History
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.following import NOT_BALANCED, checkpoints_of
from streamrl.inspection.audit.report import AlgorithmBalance, AuditReport, Waiting
from streamrl.inspection.export import ALL, USUAL, Exporter, ExportManifest, Format, SegmentHistory
from streamrl.inspection.process import tune_garbage_collector
from streamrl.inspection.source import PastRun, history_of, open_run
from streamrl.schemas.errors import UserError
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.topics import Topic

if TYPE_CHECKING:
    from streamrl.inspection.trajectory_columns import Place, Trained

WIDTH = 100
"""Characters in a line of the table where standard output is not a terminal, so that no line is wrapped."""


def audit_run(run: Path | None, export: Path | None, *, as_json: bool) -> int:
    """Audit a run, or an export of one, and print the report. The exit code is 0 if it balances, 4 if not.

    Raises:
        UserError: there is no such run, or its topics are found nowhere.
    """
    if run is None and export is None:
        raise UserError("expected a run to audit, got none; name its directory, its configuration, or --export DIR")
    report = audit_history(None if run is None else open_run(run), export)
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0 if report.is_balanced else NOT_BALANCED


def audit_history(run: PastRun | None, export: Path | None) -> AuditReport:
    """The audit of a run, or of an export if one is named.

    Raises:
        UserError: the run's topics are found nowhere.
    """
    if export is not None:
        exported = SegmentHistory(export)
        with _progress() as progress:
            return uvloop.run(audit(exported, exported.manifest.run, lambda: exported.manifest.checkpoints, progress))
    assert run is not None, "a run or an export is named"
    tune_garbage_collector()
    # The folder is entered first and so removed last, after a broker on a copy of the run's data has stopped.
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-audit-") as scratch,
        history_of(run, None, Path(scratch), _print_progress) as history,
        _progress() as progress,
    ):
        # A callable, because the audit must list checkpoints just before it fixes the ends of the topics.
        return uvloop.run(audit(history, run.name, lambda: checkpoints_of(run), progress))


def export_run(run: Path, to: Path | None, encoding: Format, topics: Sequence[str]) -> int:
    """Write a run's topics into files, and return the exit code.

    Raises:
        UserError: there is no such run or topic, its topics are found nowhere, or the directory is not empty.
    """
    past, wanted = open_run(run), _named_topics(topics)
    target = to or past.directory.path / "export"
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-export-") as scratch,
        history_of(past, None, Path(scratch), _print_progress) as history,
        _progress() as progress,
    ):
        exporter = Exporter(
            history, past.name, past.directory.config, target, encoding, progress, partial(_trained, past, history)
        )
        # The argument is evaluated first, so checkpoints are listed before ``export`` fixes the ends of the topics.
        manifest = uvloop.run(exporter.export(wanted, checkpoints_of(past)))
    for line in _described(manifest):
        print(line)
    print(f"exported to {target}")
    return 0


async def _trained(run: PastRun, history: History) -> "dict[Place, Trained]":
    from streamrl.inspection.tables import trained_trajectories  # needs an optional package, as Parquet files do

    return await trained_trajectories(history, run.name, run.settings.algorithm.name)


def _named_topics(names: Sequence[str]) -> list[Topic]:
    if not names:
        return list(USUAL)
    by_name = {topic.name: topic for topic in ALL}
    for name in names:
        if name not in by_name and name != "all":
            raise UserError(f"expected topics among {', '.join(by_name)} or 'all', got {name!r}")
    # A topic that is named twice is exported once.
    return list(ALL) if "all" in names else [by_name[name] for name in dict.fromkeys(names)]


def _described(manifest: ExportManifest) -> Iterator[str]:
    for name, topic in manifest.topics.items():
        records, size = sum(file.records for file in topic.files), sum(file.size for file in topic.files)
        yield f"{name}: {records:,} records in {len(topic.files)} files, {size / 1e6:.1f} MB"


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr)


def print_report(report: AuditReport, console: Console) -> None:
    """Print the report. Its first line says whether the accounts add up, and if not, what breaks them first."""

    def say(line: str) -> None:
        # Lines contain names from the topic: their brackets are not Rich markup, and a line stays one line.
        console.print(plain_text(line), soft_wrap=True, markup=False, highlight=False)

    say(headline(report))
    for violation in report.violations[1:]:
        say(str(violation))
    console.print(_table(report))
    for line in _facts(report):
        say(line)


def headline(report: AuditReport) -> str:
    """One line that says whether the accounts add up, and if not, the first violation."""
    if report.violations:
        return f"NOT BALANCED: {report.violations[0]}"
    if not report.is_balanced:
        return "NOT BALANCED: the figures do not add up, but no single record is wrong"
    return f"balanced: run {report.run}, {report.produced} records, every one with exactly one fate"


def _table(report: AuditReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    columns = report.algorithms
    for own in columns:
        table.add_column(Text(plain_text(own.algorithm)), justify="right")
    table.add_column("total", justify="right")

    def row(name: str, figures: Iterable[int], *, indent: bool = False) -> None:
        numbers = list(figures)
        shown = [f"{number:,}" for number in (*numbers, sum(numbers))]
        table.add_row(Text(plain_text(f"  {name}" if indent else name)), *shown)

    # No trainer has reported and there is no checkpoint: every produced record is pending.
    if not columns:
        table.add_row("produced", f"{report.produced:,}")
        table.add_row("= pending", f"{report.produced:,}")
        return table
    row("produced", (own.produced for own in columns))
    row("= trained", (own.trained for own in columns))
    row("+ skipped", (own.skipped_in_all for own in columns))
    for reason in sorted({reason for own in columns for reason in own.skipped}):
        row(reason, (own.skipped.get(reason, 0) for own in columns), indent=True)
    row("+ pending", (own.pending for own in columns))
    for name in (reason.name.lower() for reason in Waiting):
        if any(own.waiting.get(name) for own in columns):
            row(name, (own.waiting.get(name, 0) for own in columns), indent=True)
    if any(own.carried_over for own in columns):
        row("+ finished on another cluster", (own.carried_over for own in columns))
    if any(own.expired_fates for own in columns):
        row("+ with an expired fate", (own.expired_fates for own in columns))
    return table


def _facts(report: AuditReport) -> Iterable[str]:
    for own in report.algorithms:
        yield from _facts_of(own)
    # produced = distinct + copies + undecodable
    copies = report.produced - report.undecodable - report.distinct
    yield f"records: {report.distinct:,} trajectories, {copies:,} copies, {report.undecodable:,} undecodable"
    if report.orders:
        missing = report.ordered_unproduced
        yield f"ordered: {report.ordered:,} trajectories in {report.orders:,} orders, {missing:,} not produced"
    if report.continued:
        yield f"continued by another worker: {report.continued:,} trajectories, {report.continuations:,} times in all"
    if report.sampled:
        yield f"graded: {report.sampled - report.in_grading:,} trajectories, {report.in_grading:,} are with the graders"
    if report.sessions:
        yield f"sessions: {report.sessions:,} trajectories of {report.turns:,} turns"
    if report.dead_letters:
        reasons = ", ".join(f"{name} {count:,}" for name, count in report.dead_letters.items())
        yield f"dead letters: {reasons}"
    if report.expired:
        yield f"retention has deleted {report.expired:,} offsets at the start of the log"
    yield f"audited in {report.seconds:.1f} s"


def _facts_of(own: AlgorithmBalance) -> Iterable[str]:
    chain = " → ".join(map(str, own.lineages)) or "none"
    compared = own.checkpoint or "none"
    yield f"{own.algorithm}: {own.steps:,} steps, lineages {chain}, compared with checkpoint {compared}"
    for by, undone in (("crashes", own.undone), ("the operator's restore", own.rolled_back)):
        if undone.steps or undone.lineages or undone.rows:
            yield (
                f"{own.algorithm}: undone by {by}: {undone.steps} steps with {undone.trained} trajectories, "
                f"{undone.rows} skip rows, {undone.lineages} whole lineages"
            )
    if own.refused_steps:
        yield f"{own.algorithm}: {own.refused_steps} refused steps"
    if own.expired_trained or own.expired_skipped:
        yield (
            f"{own.algorithm}: fates of records that retention has deleted since: {own.expired_trained} trained, "
            f"{own.expired_skipped} skipped"
        )
    for reason in Waiting:
        if count := own.waiting.get(reason.name.lower()):
            yield f"{own.algorithm}: pending {reason.name.lower()} {count:,}: {reason.value}"
    for note in own.notes:
        yield f"{own.algorithm}: {note}"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar per topic on a terminal, and nothing elsewhere."""
    # In a log, each move of a bar would be a line of control characters.
    if not sys.stderr.isatty():
        yield lambda topic, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # On standard error and transient: standard output holds the report and nothing else.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(topic: str, done: int, total: int) -> None:
            if topic not in tasks:
                tasks[topic] = bars.add_task(topic, total=total)
            bars.update(tasks[topic], completed=done)

        yield advance
