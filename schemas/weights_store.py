"""The weights store as a directory: one sub-directory per version, complete once its manifest is there."""

from pathlib import Path

from schemas.identifiers import PolicyVersion

MANIFEST = "manifest.json"


def complete_versions(root: Path) -> list[PolicyVersion]:
    """Complete versions, oldest first."""
    found = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found.append(PolicyVersion.parse(manifest.parent.name))
        except ValueError:
            continue
    return sorted(found)
