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
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model|delta)$")
]


class WeightFile(Part):
    """One file of a version: plain name (never a path), size in bytes, sha256 in hex."""

    name: WeightFileName
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class WeightDelta(Part):
    """How a file of the version before becomes the one of this version (``schemas/weight_deltas.py``).

    ``file``: what to fetch in place of the whole file, which is ``target`` among the manifest's files and can be
    fetched as well; ``base``: the version whose ``target`` it is applied to; ``base_manifest_sha256``: of its manifest.
    """

    file: WeightFile
    target: WeightFileName
    base: PolicyVersion
    base_manifest_sha256: Sha256


class WeightManifest(Part):
    """The content of ``manifest.json`` in a version's directory; written last, so its presence means complete.

    ``files``: all that makes up the version. ``delta``, if there is one, saves whoever has its base most of them.
    """

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    files: tuple[WeightFile, ...]
    created_at: float
    delta: WeightDelta | None = None


def complete_versions(root: Path) -> list[PolicyVersion]:
    """Complete versions, oldest first."""
    found = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found.append(PolicyVersion.parse(manifest.parent.name))
        except ValueError:
            continue
    return sorted(found)
