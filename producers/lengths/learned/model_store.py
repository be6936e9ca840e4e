"""Versioned directories of fitted length models: the model's files, and a manifest that is written last.

A version's directory is named for its kind, ``trees-00000003`` or ``language-00000003``, so both kinds may share a
folder. The caller writes and reads the model's files.

Invariants:
- a_version_is_complete_or_absent: it is written under another name and renamed after its manifest was written. The
  manifest has the checksums of all files;
- damaged_versions_are_skipped: the newest complete version is used. A damaged one is not changed, and its number is not
  used again.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.schemas.errors import MalformedFrame, ModelError
from streamrl.schemas.files import sha256_of

log = structlog.get_logger()

MANIFEST = "manifest.json"
KEPT_VERSIONS = 3
"""Versions kept: the newest, a fallback if it is damaged, and one that a reader may be opening."""

Model = TypeVar("Model")


class Manifest(BaseModel):
    """``policy_version``: the newest policy version in the model's training data; ``observations``: its completions.

    ``levels``: by data set, the level of log(length) with which the model was fitted, and the level's number of
    completions. ``details``: further numbers that this kind of model needs. ``files``: sha256 by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    observations: int = Field(ge=0)
    levels: dict[str, tuple[float, int]]
    details: dict[str, float] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelStore:
    """The versions of one kind of model in a folder, which need not exist yet."""

    folder: Path
    kind: Literal["trees", "language"]

    def save(self, manifest: Manifest, write: Callable[[Path], None]) -> Path:
        """Save a version atomically, and delete the oldest ones. ``write``: writes the model's files to a directory.

        Raises:
            OSError: the version cannot be written, or exists.
        """
        target = self.folder / f"{self.kind}-{manifest.version:08d}"
        unfinished = self.folder / f".{target.name}.{os.getpid()}.part"
        # Files that a killed process with the same pid left unfinished must not get into this version.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            files = {path.name: sha256_of(path) for path in sorted(unfinished.iterdir()) if path.is_file()}
            (unfinished / MANIFEST).write_text(manifest.model_copy(update={"files": files}).model_dump_json(indent=1))
            # After a crash before this line the directory has a name that readers ignore.
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for _, old in self._versions()[KEPT_VERSIONS:]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def load_newest(self, read: Callable[[Path, Manifest], Model], newer_than: int = 0) -> Model | None:
        """The newest usable version above ``newer_than``; None if there is none."""
        for version, path in self._versions():
            if version <= newer_than:
                break
            try:
                return read(path, read_manifest(path))
            except (MalformedFrame, ModelError, OSError) as error:
                log.warning("length model cannot be used", path=str(path), error=str(error))
        return None

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest undamaged version; None if there is none."""
        for _, path in self._versions():
            with contextlib.suppress(MalformedFrame):
                return path, read_manifest(path)
        return None

    def next_version(self) -> int:
        """One more than the highest version, damaged or not; 1 for the first."""
        return 1 + next((version for version, _ in self._versions()), 0)

    def _versions(self) -> list[tuple[int, Path]]:
        """All versions, newest first."""
        name = re.compile(rf"{self.kind}-(\d{{8}})")
        found: list[tuple[int, Path]] = []
        # A folder that does not exist yet has no versions.
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if match := name.fullmatch(path.name):
                    found.append((int(match[1]), path))
        return sorted(found, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a version, after checking its files.

    Raises:
        MalformedFrame: there is no manifest, or a file does not match its checksum.
    """
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        # Only the file's name is used: a manifest must not lead to files of other folders.
        wrong = [name for name, expected in manifest.files.items() if sha256_of(path / Path(name).name) != expected]
    except (OSError, ValidationError) as error:
        raise MalformedFrame(f"expected a length model in {path}, got: {error}; delete it") from error
    if wrong:
        raise MalformedFrame(
            f"expected the files of {path} to match their checksums, got other contents of {', '.join(wrong)}; "
            "delete the directory"
        )
    return manifest
