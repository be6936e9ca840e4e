"""Where a start of a run begins: at step 0, at a checkpoint, or nowhere, because its last step is taken. Read only.

Invariant a_run_that_could_go_on_is_not_refused: a run is complete only if the checkpoint that the trainer would restore
is at the last step, and ``summary.json`` covers it; in every uncertain case the trainer is started and decides.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import structlog

from streamrl.consumers.training.checkpoints.catalogue import newest_model, next_start
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, check_storage, open_storage
from streamrl.schemas.errors import CheckpointError
from streamrl.settings.differences import OWN_TO_A_RUN, differing, flat
from streamrl.settings.loading import as_toml
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

MAX_CHANGES = 5
"""Changed settings that the line of a resumed run names: it has to stay one line."""

log = structlog.get_logger()


def resumed_step(settings: Settings) -> int:
    """The step that the trainer would go on from, by sound manifests; 0: there is none of this run.

    Raises:
        SettingsError: ``training.checkpoint_location`` names no storage that can be opened.
    """
    try:
        newest = next_start(storage_of(settings))
    except CheckpointError:
        return 0
    # A checkpoint location may be shared: one of another run or algorithm is none of ours.
    own = (settings.run.name, settings.algorithm.name)
    return newest.step if newest is not None and (newest.run, newest.algorithm) == own else 0


def check_checkpoints(settings: Settings) -> None:
    """Make sure that the storage of checkpoints answers: a trainer that cannot reach it would be restarted for nothing.

    Raises:
        SettingsError: it does not, or it cannot be opened.
    """
    check_storage(settings.checkpoint_location)


def final_model(settings: Settings) -> Path | None:
    """The model of the newest checkpoint, wherever checkpoints are kept; None if it cannot be had, which is logged."""
    if settings.evaluation.function is None:
        return None  # nobody asks for it, and out of an object store it would have to be fetched
    try:
        return newest_model(settings.checkpoint_location, settings.run.path / "cache")
    except CheckpointError as error:
        log.warning("the newest checkpoint cannot be evaluated", error=str(error))
        return None


def is_complete(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the run, resumed at ``step``, has nothing left to train and its summary is written.

    Its newest checkpoint is verified only then, since reading it whole takes time.
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
    """The message for whoever would join a run that is complete, by what is in its directory here; None: it is not."""
    step = resumed_step(settings)
    return complete_line(settings, step) if is_complete(settings, RunDirectory(settings.run.path), step) else None


def complete_line(settings: Settings, step: int) -> str:
    """The message about a complete run."""
    return (
        f"run {settings.run.name} is already at step {step} of {settings.training.max_steps}: nothing to train; "
        "raise --training.max_steps, or name another run with --run.name"
    )


def resuming_line(settings: Settings, kept: Path, step: int) -> str:
    """Where the run goes on, and which settings differ from ``kept``, the file of its last start."""
    changes = _changed_settings(settings, kept)
    more = len(changes) - MAX_CHANGES
    shown = ", ".join(changes[:MAX_CHANGES]) + (f" and {more} more" if more > 0 else "")
    return f"going on from step {step}" + (f"; changed: {shown}" if changes else "")


def storage_of(settings: Settings) -> CheckpointStorage:
    """Where the run keeps its checkpoints.

    Raises:
        SettingsError: ``training.checkpoint_location`` names no storage that can be opened.
    """
    return open_storage(settings.checkpoint_location, settings.run.path / "cache")


def _is_summarised(settings: Settings, directory: RunDirectory, step: int) -> bool:
    """Whether the summary is of that step or a later one, with the evaluation after it if one is set."""
    try:
        summary: Any = json.loads(directory.summary.read_text())
    except (OSError, ValueError):
        return False
    steps = summary.get("steps") if isinstance(summary, dict) else None
    if not isinstance(steps, int) or steps < step:
        return False
    return settings.evaluation.function is None or any(key.endswith("_after") for key in summary)


def _changed_settings(settings: Settings, kept: Path) -> list[str]:
    try:
        trees = tomllib.loads(kept.read_text()), tomllib.loads(as_toml(settings))
    except (OSError, ValueError):
        return []
    differences = differing([flat(tree) for tree in trees], ignored=OWN_TO_A_RUN)
    return [f"{key} {before} → {now}" for key, (before, now) in differences]
