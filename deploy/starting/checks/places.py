"""Whether the run can write what it will write: its directory, checkpoints, and enough disk. Leaves nothing behind."""

import shutil
import tempfile
from pathlib import Path

from consumers.training.persistence.locations import REMOTE, open_location
from deploy.settings.tree import Settings
from deploy.starting.checks.check import Check
from schemas.errors import CheckpointError, UserError

FLOOR_BYTES = 1 << 30
"""For logs, Kafka's data and whatever else, beside weights and checkpoints."""
_BYTES_PER_PARAMETER = 4
_CHECKPOINT_COPIES = 3
"""Weights and the two moments of AdamW."""


def check_places(settings: Settings, parameters: int) -> list[Check]:
    """Directory, checkpoints and disk; ``parameters`` of the model, 0 where none is trained.

    Raises:
        UserError: a place cannot be written.
    """
    return [_checkpoints(settings), _disk(settings, parameters)]


def _checkpoints(settings: Settings) -> Check:
    location = settings.training.checkpoint_location or settings.run.path / "checkpoints"
    with tempfile.TemporaryDirectory(prefix="streamrl-dry-run-") as cache:
        place = open_location(location, Path(cache))
        if not (isinstance(location, str) and REMOTE.fullmatch(location)):
            _must_be_writable(Path(location))
        try:
            steps = [slot.step for slot in place.slots()]
        except (OSError, CheckpointError) as error:
            raise UserError(f"expected to list checkpoints at {location}, got: {error}") from error
    if steps:
        is_over = max(steps) >= settings.training.max_steps
        then = "that is the last step, nothing would be trained" if is_over else "the run would go on there"
        return Check("checkpoints", "note", f"{location} holds some up to step {max(steps)}; {then}")
    return Check("checkpoints", "ok", f"{location} can be {'reached' if '://' in str(location) else 'written'}")


def _disk(settings: Settings, parameters: int) -> Check:
    parent = _must_be_writable(settings.run.path)
    training = settings.training
    checkpoints = 0 if training.checkpoint_location else _CHECKPOINT_COPIES * (training.keep_checkpoints + 1)
    weights = training.keep_weight_versions + 1 + settings.run.workers
    needed = FLOOR_BYTES + parameters * _BYTES_PER_PARAMETER * (checkpoints + weights)
    free = shutil.disk_usage(parent).free
    said = f"about {needed / 1e9:.1f} GB for weights, checkpoints and logs, {free / 1e9:.1f} GB free at {parent}"
    if free < needed:
        return Check("disk", "fail", f"{said}; make room, keep fewer checkpoints, or set run.directory")
    return Check("disk", "ok", said)


def _must_be_writable(path: Path) -> Path:
    """The nearest directory that exists, after a file was written there and removed."""
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        raise UserError(f"expected to write into {parent} for {path}, got: {error.strerror}") from error
