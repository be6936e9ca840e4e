"""The versioned directories that language models are kept in: weights, tokenizer, head, and last a manifest.

Invariant a_version_is_whole_or_not_there: it is written under another name and renamed when its manifest is in it.
"""

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from producers.lengths.language_model import LanguageModel, Levels
from schemas.errors import MalformedFrame, ModelError

if TYPE_CHECKING:
    from producers.lengths.language_model import LengthRegressor

log = structlog.get_logger()

MANIFEST = "manifest.json"
KEPT = 3
_NAME = re.compile(r"language-(\d{8})")


class Manifest(BaseModel):
    """``files``: sha256 by name. ``levels``: by data set, median log length and number of completions."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    version: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    observations: int = Field(ge=0)
    scale: float = Field(gt=0)
    levels: dict[str, tuple[float, int]]
    files: dict[str, str] = Field(default_factory=dict)


def save(regressor: "LengthRegressor", about: Manifest, folder: Path) -> Path:
    """Write the version's directory, whole or not at all; the oldest ones go.

    Raises:
        OSError: it cannot be written.
    """
    target = folder / f"language-{about.version:08d}"
    unfinished = folder / f".{target.name}.{os.getpid()}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        regressor.save(unfinished)
        files = {path.name: _sha256(path) for path in sorted(unfinished.iterdir()) if path.is_file()}
        (unfinished / MANIFEST).write_text(about.model_copy(update={"files": files}).model_dump_json(indent=1))
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for _, old in _versions(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_newest(folder: Path, newer_than: int = 0) -> tuple[LanguageModel, Levels] | None:
    """The newest version above ``newer_than`` that can be used, ready to predict; none if there is none."""
    for version, path in _versions(folder):
        if version <= newer_than:
            break
        try:
            return load(path)
        except (MalformedFrame, ModelError, OSError) as error:
            log.warning("length model left aside", path=str(path), error=str(error))
    return None


def load(path: Path) -> tuple[LanguageModel, Levels]:
    """Read one version.

    Raises:
        MalformedFrame: it is not whole.
        ModelError: the library cannot load it.
    """
    about = read_manifest(path)
    from producers.lengths.language_model import open_regressor

    model = LanguageModel(open_regressor(path), about.scale, about.version, about.policy_version, about.observations)
    return model, about.levels


def read_manifest(path: Path) -> Manifest:
    """What a version says of itself, its files checked.

    Raises:
        MalformedFrame: there is no manifest, or a file is not as it was written.
    """
    try:
        about = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        wrong = [name for name, expected in about.files.items() if _sha256(path / Path(name).name) != expected]
    except (OSError, ValidationError) as error:
        raise MalformedFrame(f"expected a language model of lengths in {path}, got: {error}; delete it") from error
    if wrong:
        raise MalformedFrame(f"expected {path} as it was written, got other files: {', '.join(wrong)}; delete it")
    return about


def newest_whole(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest version that is as it was written; none if there is none."""
    for _, path in _versions(folder):
        with contextlib.suppress(MalformedFrame):
            return path, read_manifest(path)
    return None


def next_version(folder: Path) -> int:
    """One more than the highest, whole or not."""
    return 1 + next((version for version, _ in _versions(folder)), 0)


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _versions(folder: Path) -> list[tuple[int, Path]]:
    """Newest first."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), path))
    return sorted(found, reverse=True)
