"""Finds where a run starts: at step 0, at a checkpoint, or not at all, because it is complete. It only reads files.

Invariant an_incomplete_run_is_started_again: only a complete run is not started again. A run is complete if the
checkpoint that the trainer would restore is at the last step and ``summary.json`` covers it. In every uncertain case
the trainer is started and decides.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from streamrl.consumers.training.checkpoints.catalogue import newest_model, next_start
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, check_storage, open_storage
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.starts import ChangedValue, RunInput, RunStart, changed_inputs, read_starts
from streamrl.settings.differences import PER_RUN_SETTINGS, differing, flat
from streamrl.settings.loading import as_toml
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

MAX_CHANGES = 5
"""Most changes that the line about a resumed run names."""

log = structlog.get_logger()


def resumed_step(settings: Settings) -> int:
    """The step of the newest checkpoint of this run with a valid manifest; 0 if there is none.

    Raises:
        SettingsError: ``training.checkpoint_location`` names no storage that can be opened.
    """
    try:
        newest = next_start(storage_of(settings))
    except CheckpointError:
        return 0
    # Runs may share a checkpoint location, so checkpoints of another run or algorithm are ignored.
    own = (settings.run.name, settings.algorithm.name)
    return newest.step if newest is not None and (newest.run, newest.algorithm) == own else 0


def check_checkpoints(settings: Settings) -> None:
    """Check that the storage of checkpoints answers; otherwise the trainer would crash at each restart.

    Raises:
        SettingsError: the storage does not answer, or cannot be opened.
    """
    check_storage(settings.checkpoint_location)


def final_model(settings: Settings) -> Path | None:
    """The newest checkpoint's model, downloaded if necessary; None without an evaluation, or on an error (logged)."""
    if settings.evaluation.function is None:
        return None  # the model is not needed, and may have to be downloaded from an object store
    try:
        return newest_model(settings.checkpoint_location, settings.run.path / "cache")
    except CheckpointError as error:
        log.warning("the newest checkpoint cannot be evaluated", error=str(error))
        return None


def is_complete(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the run, resumed at ``step``, has nothing left to train and its summary is written.

    The newest checkpoint is verified only in that case, because reading all of it takes time.
    """
    last = settings.training.max_steps
    if step < last or not _is_summarised(settings, directory, step):
        return False
    from streamrl.consumers.training.checkpoints.store import CheckpointStore

    try:
        restored = CheckpointStore(storage_of(settings), settings.training.keep_checkpoints).newest()
    except CheckpointError:
        return False
    return restored is not None and restored.state.manifest.step >= last


def nothing_to_train(settings: Settings) -> str | None:
    """The message for a process that wants to join a complete run; None if the run's directory shows it incomplete."""
    step = resumed_step(settings)
    return complete_line(settings, step) if is_complete(settings, RunDirectory(settings.run.path), step) else None


def complete_line(settings: Settings, step: int) -> str:
    """The message about a complete run."""
    return (
        f"run {settings.run.name} is already at step {step} of {settings.training.max_steps}: nothing to train; "
        "raise --training.max_steps, or name another run with --run.name"
    )


def changes_since(settings: Settings, inputs: Sequence[RunInput], directory: RunDirectory) -> list[ChangedValue]:
    """The inputs and settings that differ from those of the run's last start; empty for its first start.

    Inputs come first, because nothing else shows that they changed.
    """
    starts = read_starts(directory.starts)
    before = starts[-1].inputs if starts else {}
    return [*changed_inputs(before, inputs), *_changed_settings(settings, directory.config)]


def resuming_line(start: RunStart) -> str:
    """A line with the step at which the run continues, what changed, and what becomes of earlier trajectories.

    Empty for a run that starts at step 0 and in which nothing changed.
    """
    if not (start.step or start.changed):
        return ""
    shown = ", ".join(map(str, start.changed[:MAX_CHANGES]))
    if (more := len(start.changed) - MAX_CHANGES) > 0:
        shown += f" and {more} more"
    changed = f"; changed: {shown}" if start.changed else ""
    fates = {
        None: "",
        "skip": "; trajectories sampled before are skipped (task_changed); ingest.on_change = train trains them",
        "train": "; trajectories sampled before are trained (ingest.on_change)",
    }
    return f"continuing from step {start.step}{changed}{fates[start.earlier_trajectories]}"


def storage_of(settings: Settings) -> CheckpointStorage:
    """The storage of the run's checkpoints.

    Raises:
        SettingsError: ``training.checkpoint_location`` names no storage that can be opened.
    """
    return open_storage(settings.checkpoint_location, settings.run.path / "cache")


def _is_summarised(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the summary covers that step or a later one, with the final evaluation if one is configured."""
    try:
        summary: Any = json.loads(directory.summary.read_text())
    except (OSError, ValueError):
        return False
    steps = summary.get("steps") if isinstance(summary, dict) else None
    if not isinstance(steps, int) or steps < step:
        return False
    return settings.evaluation.function is None or any(key.endswith("_after") for key in summary)


def _changed_settings(settings: Settings, kept: Path) -> list[ChangedValue]:
    try:
        trees = tomllib.loads(kept.read_text()), tomllib.loads(as_toml(settings))
    except (OSError, ValueError):
        return []
    differences = differing([flat(tree) for tree in trees], ignored=PER_RUN_SETTINGS)
    return [ChangedValue(key, before, now) for key, (before, now) in differences]
