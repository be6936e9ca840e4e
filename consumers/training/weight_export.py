"""Writes a weight version into the store that relays serve. Knows neither relays nor workers, and waits for none.

Invariant a_version_is_whole_or_absent: the directory gets its name after its manifest was written.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from consumers.training.checkpoints.storage import appearing_directory, sha256_of
from schemas.errors import DiskFull, lacks_room
from schemas.identifiers import PolicyVersion
from schemas.weights import MANIFEST, WeightFile, WeightManifest, complete_versions

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class WeightStore:
    """``root`` holds one directory per version; the newest ``keep`` of them stay."""

    root: Path
    keep: int

    def export(
        self, tensors: dict[str, Tensor], texts: Mapping[str, str], version: PolicyVersion, step: int, now: float
    ) -> str:
        """Write ``model.safetensors``, the text files (``config.json`` …) and the manifest; its sha256 in hex.

        Not synced to the disk: a restarted trainer publishes a new version in any case.

        Raises:
            DiskFull: the store's disk has no room for it.
        """
        try:
            return self._export(tensors, texts, version, step, now)
        except (OSError, SafetensorError) as error:
            if not lacks_room(error):
                raise
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise DiskFull(
                f"expected room for {needed / 1e6:,.1f} MB of weights in {self.root.absolute()} (version {version}), "
                f"got: no space left on the device, {shutil.disk_usage(self.root).free / 1e6:,.1f} MB free; "
                "make room, then start the same command again"
            ) from error

    def _export(
        self, tensors: dict[str, Tensor], texts: Mapping[str, str], version: PolicyVersion, step: int, now: float
    ) -> str:
        with appearing_directory(self.root / str(version)) as directory:
            save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
            for name, text in texts.items():
                (directory / name).write_text(text)
            manifest = WeightManifest(
                version=version,
                step=step,
                files=tuple(_described(directory / name) for name in (WEIGHTS, *texts)),
                created_at=now,
            )
            content = manifest.model_dump_json().encode()
            (directory / MANIFEST).write_bytes(content)
        # After the new one has its name, so that there is always a version to fetch.
        self._forget_old()
        return hashlib.sha256(content).hexdigest()

    def _forget_old(self) -> None:
        for version in self.versions()[: -self.keep]:
            shutil.rmtree(self.root / str(version), ignore_errors=True)

    def versions(self) -> list[PolicyVersion]:
        """Complete versions, oldest first."""
        return complete_versions(self.root)


def _described(path: Path) -> WeightFile:
    return WeightFile(name=path.name, size=path.stat().st_size, sha256=sha256_of(path))
