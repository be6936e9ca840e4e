"""A published set of weights: the files that a worker may fetch, with their checksums, and where they lie.

The weights store is a directory with one sub-directory per version, complete once its manifest is there.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from schemas.identifiers import PolicyVersion
from schemas.trajectories import Part

MANIFEST = "manifest.json"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WeightFileName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model)$")
]


class WeightFile(Part):
    """One file of a version: plain name (never a path), size in bytes, sha256 in hex."""

    name: WeightFileName
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class WeightManifest(Part):
    """The content of ``manifest.json`` in a version's directory; written last, so its presence means complete."""

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    files: tuple[WeightFile, ...]
    created_at: float


def complete_versions(root: Path) -> list[PolicyVersion]:
    """Complete versions, oldest first."""
    found = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found.append(PolicyVersion.parse(manifest.parent.name))
        except ValueError:
            continue
    return sorted(found)
