"""Finds files of the weights store by version and plain name; everything outside the store does not exist for it.

Invariant only_complete_versions_are_served: a version's files are visible once its manifest is, and it is written last.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from schemas.identifiers import PolicyVersion
from schemas.weights_store import MANIFEST, complete_versions

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model)")


@dataclass(frozen=True)
class WeightsStore:
    """A directory with one sub-directory per version, named ``<lineage>-<number>``."""

    root: Path

    def find(self, version: str, name: str) -> Path | None:
        """The file to serve, or none if version or name is not plain, not complete, a link, or not there."""
        try:
            directory = self.root / str(PolicyVersion.parse(version))
        except ValueError:
            return None
        if _NAME.fullmatch(name) is None or not (directory / MANIFEST).is_file():
            return None
        path = directory / name
        inside = path.resolve().is_relative_to(self.root.resolve())
        return path if inside and path.is_file() and not path.is_symlink() and not directory.is_symlink() else None

    def is_gone(self, version: str) -> bool:
        """Whether a version is not there, and newer ones are: it was deleted and will not come back."""
        try:
            wanted = PolicyVersion.parse(version)
        except ValueError:
            return False
        there = self.versions()
        return wanted not in there and bool(there) and wanted < there[-1]

    def versions(self) -> list[PolicyVersion]:
        """Complete versions, oldest first."""
        return complete_versions(self.root)
