"""What an export consists of; the manifest is written last, so that its presence means complete."""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from consumers.training.persistence.manifest import CheckpointManifest
from schemas.errors import DataError
from schemas.messages.weights import Sha256
from schemas.ports.history import Extent

MANIFEST = "manifest.json"
Format = Literal["parquet", "jsonl"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SegmentFile(_Part):
    """One file of a topic: path within the export, and by partition which offsets its records span."""

    path: str
    records: int
    size: int
    sha256: Sha256
    extents: dict[int, Extent]


class ExportedTopic(_Part):
    """``extents``: what the topic held, by partition, also where no record is; files in the order of reading."""

    extents: dict[int, Extent]
    files: tuple[SegmentFile, ...]


class ExportManifest(_Part):
    """``topics`` by full name. ``checkpoints``: the run's manifests as they were before the topics were read.

    ``config``: the run's resolved settings, in its directory, which keeps the checkpoints themselves.
    """

    format: Literal[1] = 1
    run: str
    config: str
    encoding: Format
    created_at: float
    topics: dict[str, ExportedTopic]
    checkpoints: tuple[CheckpointManifest, ...] = ()


def write_manifest(directory: Path, manifest: ExportManifest) -> None:
    """Make the export complete, durably."""
    draft = directory / f".{MANIFEST}"
    with draft.open("w") as file:
        file.write(manifest.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> ExportManifest:
    """The manifest of an export.

    Raises:
        DataError: there is no complete export in this directory.
    """
    try:
        return ExportManifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"expected a complete export with {MANIFEST} in {directory}, found none") from error
    except (OSError, ValidationError) as error:
        raise DataError(f"expected the manifest of an export in {directory}, got {error}") from error
