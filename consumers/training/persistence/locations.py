"""Where checkpoints live: what the store asks of such a place, and which text names which. Knows no tensors."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from consumers.training.persistence.manifest import CheckpointManifest

REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://.*")


@dataclass(frozen=True)
class Slot:
    """The place of one checkpoint; ``lineage`` None: its name does not tell."""

    name: str
    step: int
    lineage: int | None = None


class CheckpointLocation(Protocol):
    """Storage of one run's checkpoints and lineage claims. Every method may raise ``OSError``."""

    @property
    def scratch(self) -> Path:
        """The local directory whose disk the files are first written to."""

    def claims(self) -> list[int]:
        """Lineage numbers claimed so far, in no order."""

    def claim(self, number: int, content: bytes) -> bool:
        """Claim a number; false if it was taken. Of any number of claimants, one is told true."""

    def clear_leftovers(self) -> None:
        """Undo what a dead writer left half done. For the holder of the newest lineage only."""

    def slot(self, lineage: int, step: int) -> Slot:
        """Where a checkpoint belongs."""

    def slots(self) -> list[Slot]:
        """Places that hold something, in no order; whether it is a checkpoint is not looked at."""

    def address(self, slot: Slot) -> str:
        """The place in words that the user can find it by."""

    def manifest(self, slot: Slot) -> bytes | None:
        """The manifest's bytes, or none if there is none."""

    def staging(self, slot: Slot, lineage: int) -> AbstractContextManager[Path]:
        """An empty local directory to write the files into; it is gone after the block."""

    def secure(self, staged: Path) -> None:
        """Make a staged file durable, if its content stays where it was written. Called from several threads."""

    def publish(self, slot: Slot, staged: Path, manifest: CheckpointManifest, fence: Callable[[], None]) -> None:
        """Make the secured files a checkpoint, durably: the manifest becomes visible last, right after ``fence``."""

    def fetch(self, slot: Slot, manifest: CheckpointManifest) -> Path:
        """A local directory with the checkpoint's files and manifest; not verified."""

    def remove(self, slot: Slot) -> None:
        """Forget a checkpoint, the manifest first."""

    def __str__(self) -> str:
        """The location as text that opens it again."""


def open_location(location: str | Path, cache: Path) -> CheckpointLocation:
    """A directory, or a URL of an object store: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, ``memory://name``.

    Endpoint and credentials come from the usual environment (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID`` …). ``cache``
    takes the files that go to or come from an object store. ``memory://`` lives as long as the process.

    Raises:
        SettingsError: the URL names no store that is known, or lacks something that the store needs.
    """
    if isinstance(location, str) and REMOTE.fullmatch(location):
        from consumers.training.persistence.places.objects import open_objects

        return open_objects(location, cache)
    from consumers.training.persistence.places.local import LocalLocation

    return LocalLocation(Path(location))
