"""Where a start of a run begins: anew, at a checkpoint, or nowhere, because its last step was taken. Changes nothing.

Invariant a_run_that_could_go_on_is_not_refused: a run is over only if the checkpoint that the trainer would restore is
at the last step, and ``summary.json`` tells of it; whatever is in doubt is left to the trainer.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from consumers.training.persistence.catalogue import read_manifests
from consumers.training.persistence.locations import CheckpointLocation, open_location
from deploy.reporting.drawing.tables import differing_settings
from deploy.reporting.record.rows import Rows
from deploy.reporting.record.run_record import RunRecord, flat
from deploy.runs.directory import RunDirectory
from deploy.settings.loading import as_toml
from deploy.settings.tree import Settings
from schemas.errors import CheckpointError

MOST_CHANGES = 5


def resumed_step(settings: Settings) -> int:
    """The step that the trainer would go on from, by the newest sound manifest; 0: there is none of this run.

    Raises:
        SettingsError: ``training.checkpoint_location`` names no place that can be opened.
    """
    try:
        newest = next(iter(read_manifests(_place(settings))), None)
    except CheckpointError:
        return 0
    own = (settings.run.name, settings.algorithm.name)
    return newest.step if newest is not None and (newest.run, newest.algorithm) == own else 0


def is_over(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the run, resumed at ``step``, has nothing to train and nothing to tell that it has not told already.

    Its newest checkpoint is verified only then, since that takes time.
    """
    last = settings.training.max_steps
    if step < last or not _is_told(settings, directory, step):
        return False
    from consumers.training.persistence.checkpoint import CheckpointStore

    try:
        restored = CheckpointStore(_place(settings), settings.training.keep_checkpoints).newest()
    except CheckpointError:
        return False
    return restored is not None and restored.state.manifest.step >= last


def over_line(settings: Settings, step: int) -> str:
    """What the user is told of a run that is over."""
    return (
        f"run {settings.run.name} is already at step {step} of {settings.training.max_steps}: nothing to train; "
        "raise --training.max_steps, or name another run with --run.name"
    )


def going_on_line(settings: Settings, kept: Path, step: int) -> str:
    """Where the run goes on, and which settings are others than in ``kept``, the file of its last start."""
    changes = _changes(settings, kept)
    more = len(changes) - MOST_CHANGES
    shown = ", ".join(changes[:MOST_CHANGES]) + (f" and {more} more" if more > 0 else "")
    return f"going on from step {step}" + (f"; changed: {shown}" if changes else "")


def _place(settings: Settings) -> CheckpointLocation:
    location = settings.training.checkpoint_location or settings.run.path / "checkpoints"
    return open_location(location, settings.run.path / "cache")


def _is_told(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the summary is of that step or a later one, with the evaluation after it if one is wanted."""
    try:
        summary: Any = json.loads(directory.summary.read_text())
    except (OSError, ValueError):
        return False
    steps = summary.get("steps") if isinstance(summary, dict) else None
    if not isinstance(steps, int) or steps < step:
        return False
    return settings.evaluation.function is None or any(key.endswith("_after") for key in summary)


def _changes(settings: Settings, kept: Path) -> list[str]:
    try:
        trees = tomllib.loads(kept.read_text()), tomllib.loads(as_toml(settings))
    except (OSError, ValueError):
        return []
    records = [RunRecord(settings.run.name, kept.parent, Rows(), settings=flat(tree)) for tree in trees]
    return [f"{key} {before} → {now}" for key, (before, now) in differing_settings(records)]
