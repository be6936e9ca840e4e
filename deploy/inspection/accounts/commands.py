"""What `streamrl audit` and `streamrl export` do: find the run, open its history, show progress, end with a code."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from consumers.audit.checks.verdict import Verdict
from consumers.training.persistence.catalogue import read_manifests
from consumers.training.persistence.manifest import CheckpointManifest
from deploy.inspection.accounts.view import WIDTH, show_verdict
from deploy.inspection.auditing import audit
from deploy.inspection.segments.export import ALL, USUAL, Exporter
from deploy.inspection.segments.history import SegmentHistory
from deploy.inspection.segments.manifest import ExportManifest, Format
from deploy.inspection.source import PastRun, history_of, open_run
from deploy.wiring.collector import settle_collector
from schemas.errors import UserError
from schemas.wire.topics import Topic

NOT_BALANCED = 4


def audit_run(run: Path | None, export: Path | None, *, as_json: bool) -> int:
    """Audit a run, or an export of one; the exit code is 0 if it balances, 4 if not.

    Raises:
        UserError: there is no such run, or nothing has its topics.
    """
    verdict = _audit_export(export) if export is not None else _audit_topics(run)
    if as_json:
        print(json.dumps(verdict.to_json(), indent=1))
    else:
        show_verdict(verdict, Console(width=None if sys.stdout.isatty() else WIDTH))
    return 0 if verdict.is_balanced else NOT_BALANCED


def _audit_export(directory: Path) -> Verdict:
    history = SegmentHistory(directory)
    with _progress() as progress:
        return uvloop.run(audit(history, history.manifest.run, lambda: history.manifest.checkpoints, progress))


def _audit_topics(run: Path | None) -> Verdict:
    if run is None:
        raise UserError("expected a run to audit, got none; name its directory, its configuration, or --export DIR")
    past = open_run(run)
    settle_collector()
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-audit-") as scratch,
        history_of(past, None, Path(scratch), _tell) as history,
        _progress() as progress,
    ):
        return uvloop.run(audit(history, past.name, lambda: checkpoints_of(past), progress))


def checkpoints_of(run: PastRun) -> list[CheckpointManifest]:
    """The manifests of a run's checkpoints, newest first; they are read without any tensor.

    Raises:
        CheckpointError: their place cannot be read.
    """
    return read_manifests(run.settings.training.checkpoint_location or run.directory.checkpoints)


def export_run(run: Path, to: Path | None, encoding: Format, topics: Sequence[str]) -> int:
    """Write a run's topics into files; the exit code.

    Raises:
        UserError: there is no such run or topic, nothing has its topics, or the directory is not empty.
    """
    past, wanted = open_run(run), _named_topics(topics)
    target = to or past.directory.path / "export"
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-export-") as scratch,
        history_of(past, None, Path(scratch), _tell) as history,
        _progress() as progress,
    ):
        exporter = Exporter(history, past.name, past.directory.config, target, encoding, progress)
        manifest = uvloop.run(exporter.export(wanted, checkpoints_of(past)))
    for line in _described(manifest):
        print(line)
    print(f"exported to {target}")
    return 0


def _named_topics(names: Sequence[str]) -> list[Topic]:
    if not names:
        return list(USUAL)
    by_name = {topic.name: topic for topic in ALL}
    for name in names:
        if name not in by_name and name != "all":
            raise UserError(f"expected topics among {', '.join(by_name)} or 'all', got {name!r}")
    return list(ALL) if "all" in names else [by_name[name] for name in dict.fromkeys(names)]


def _described(manifest: ExportManifest) -> Iterator[str]:
    for name, topic in manifest.topics.items():
        records, size = sum(file.records for file in topic.files), sum(file.size for file in topic.files)
        yield f"{name}: {records:,} records in {len(topic.files)} files, {size / 1e6:.1f} MB"


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per topic on a terminal, silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda topic, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(topic: str, done: int, total: int) -> None:
            if topic not in tasks:
                tasks[topic] = bars.add_task(topic, total=total)
            bars.update(tasks[topic], completed=done)

        yield tell
