"""Checkpoints in a local directory: ``step_{N}`` is a Hugging Face model directory, ``lineages/`` holds the claims.

Invariants:
- a_checkpoint_appears_whole: it is written aside, synced, and gets its name by one rename;
- a_newer_checkpoint_is_never_written_over: a rename onto an existing checkpoint fails.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from consumers.training.persistence.files import TEMPORARY, remove_leftovers, sync
from consumers.training.persistence.locations import Slot
from consumers.training.persistence.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STATE,
    CheckpointManifest,
    encode_manifest,
)

CLAIMS = "lineages"
REPLACED = f"{TEMPORARY}old-"


@dataclass(frozen=True)
class LocalLocation:
    """``root`` need not exist yet."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @property
    def scratch(self) -> Path:
        """Files are written beside the checkpoints."""
        return self.root

    def claims(self) -> list[int]:
        """Lineage numbers claimed so far, in no order."""
        return [int(path.stem) for path in (self.root / CLAIMS).glob("*.json") if path.stem.isdecimal()]

    def claim(self, number: int, content: bytes) -> bool:
        """Create the claim's file, which must not exist."""
        folder = self.root / CLAIMS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}.json"
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        for made in (path, folder, self.root):
            sync(made)
        return True

    def clear_leftovers(self) -> None:
        """Put back a checkpoint whose replacement never came, and delete what was half written."""
        for aside in self.root.glob(f"{REPLACED}step_*"):
            target = self.root / aside.name.removeprefix(REPLACED)
            if not target.exists():
                aside.rename(target)
        remove_leftovers(self.root)

    def slot(self, lineage: int, step: int) -> Slot:
        """One place for a step: a lineage takes over the place of an abandoned one."""
        return Slot(f"step_{step}", step)

    def slots(self) -> list[Slot]:
        """Directories named as checkpoints."""
        named = ((path.name, re.fullmatch(r"step_([0-9]+)", path.name)) for path in self.root.glob("step_*"))
        return [Slot(name, int(match[1])) for name, match in named if match is not None]

    def address(self, slot: Slot) -> str:
        """The directory."""
        return str(self.root / slot.name)

    def manifest(self, slot: Slot) -> bytes | None:
        """The manifest's bytes, or none if there is none."""
        path = self.root / slot.name / STATE / MANIFEST
        try:
            with path.open("rb") as file:
                return file.read(MAX_MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    @contextmanager
    def staging(self, slot: Slot, lineage: int) -> Iterator[Path]:
        """A directory on the same file system, named by the lineage: two trainers never share one."""
        temporary = self.root / f"{TEMPORARY}{lineage}-{slot.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def secure(self, staged: Path) -> None:
        """Sync it."""
        sync(staged)

    def publish(self, slot: Slot, staged: Path, manifest: CheckpointManifest, fence: Callable[[], None]) -> None:
        """Sync what names the files, then rename the directory in; what an abandoned lineage left there goes."""
        written = staged / STATE / MANIFEST
        written.write_bytes(encode_manifest(manifest))
        for path in (written, *(path for path in staged.rglob("*") if path.is_dir()), staged):
            sync(path)
        fence()
        target, aside = self.root / slot.name, self.root / f"{REPLACED}{slot.name}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        try:
            fence()
            staged.rename(target)
        except Exception:
            if aside.exists() and not target.exists():
                aside.rename(target)
            raise
        sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)

    def fetch(self, slot: Slot, manifest: CheckpointManifest) -> Path:
        """The checkpoint itself: it is here already."""
        return self.root / slot.name

    def remove(self, slot: Slot) -> None:
        """Take the name away first, so that no part of it remains as a checkpoint."""
        gone = self.root / f"{TEMPORARY}gone-{slot.name}"
        shutil.rmtree(gone, ignore_errors=True)
        try:
            (self.root / slot.name).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)
