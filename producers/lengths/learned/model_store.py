"""The versioned directories that fitted length models are kept in: the model's own files, and last a manifest.

Trees and language models are kept alike, as ``trees-00000003`` or ``language-00000003``, so both kinds may share a
folder. It knows neither: who saves writes the files, who loads reads them.

Invariants:
- a_version_is_whole_or_not_there: it is written under another name and renamed when its manifest is in it, and the
  manifest has the checksums of all files;
- a_damaged_version_gives_way: the newest whole one is used, a damaged one is left alone, and its number is not used
  again.
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
"""The newest, one to fall back on if it is damaged, and one that a reader may have begun to open."""

Model = TypeVar("Model")


class Manifest(BaseModel):
    """``policy_version``: the newest policy whose completions the model was fitted to; ``observations``: how many.

    ``levels``: by data set, the logarithm of length that the model was fitted over, and the number of completions that
    it rests on. ``details``: what this kind of model needs besides. ``files``: sha256 by name.
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
        """Keep a version, whole or not at all; the oldest ones go. ``write`` puts the model's files into a directory.

        Raises:
            OSError: it cannot be written, or the version exists.
        """
        target = self.folder / f"{self.kind}-{manifest.version:08d}"
        unfinished = self.folder / f".{target.name}.{os.getpid()}.part"
        # What a killed process that had our pid left unfinished must not get into this version.
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            write(unfinished)
            files = {path.name: sha256_of(path) for path in sorted(unfinished.iterdir()) if path.is_file()}
            (unfinished / MANIFEST).write_text(manifest.model_copy(update={"files": files}).model_dump_json(indent=1))
            # A crash before this line leaves a directory whose name no reader looks for.
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for _, old in self._versions()[KEPT_VERSIONS:]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def load_newest(self, read: Callable[[Path, Manifest], Model], newer_than: int = 0) -> Model | None:
        """The newest version above ``newer_than`` that can be used; none if there is none."""
        for version, path in self._versions():
            if version <= newer_than:
                break
            try:
                return read(path, read_manifest(path))
            except (MalformedFrame, ModelError, OSError) as error:
                log.warning("length model cannot be used", path=str(path), error=str(error))
        return None

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest version that is as it was written; none if there is none."""
        for _, path in self._versions():
            with contextlib.suppress(MalformedFrame):
                return path, read_manifest(path)
        return None

    def next_version(self) -> int:
        """One more than the highest, damaged or not; 1 for the first."""
        return 1 + next((version for version, _ in self._versions()), 0)

    def _versions(self) -> list[tuple[int, Path]]:
        """Newest first."""
        name = re.compile(rf"{self.kind}-(\d{{8}})")
        found: list[tuple[int, Path]] = []
        # A folder that does not exist yet has no versions.
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if match := name.fullmatch(path.name):
                    found.append((int(match[1]), path))
        return sorted(found, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """What a version says of itself, its files checked.

    Raises:
        MalformedFrame: there is no manifest, or a file is not as it was written.
    """
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        # Only the name counts: a manifest must not make us read files of other folders.
        wrong = [name for name, expected in manifest.files.items() if sha256_of(path / Path(name).name) != expected]
    except (OSError, ValidationError) as error:
        raise MalformedFrame(f"expected a length model in {path}, got: {error}; delete it") from error
    if wrong:
        raise MalformedFrame(f"expected {path} as it was written, got other files: {', '.join(wrong)}; delete it")
    return manifest
