"""Writes a weight version into the store that relays serve. Knows neither relays nor workers, and waits for none.

A version is a whole file of weights. With deltas, a second file holds the difference to the version before. A worker
that has the version before fetches the delta, others the whole file.

Invariants, each with a test of its name:
- a_version_is_whole_or_absent: the directory gets its name after its manifest was written;
- a_version_is_never_replaced: neither by another of its name, nor by a late one of an older lineage.
"""

import errno
import hashlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from streamrl.schemas.errors import DiskFull, LateExport, is_disk_full_error
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weight_deltas import write_delta
from streamrl.schemas.weights import (
    ADAPTER,
    MANIFEST,
    TEMPORARY_PREFIX,
    WEIGHTS,
    WeightAdapter,
    WeightDelta,
    WeightManifest,
    complete_versions,
    describe_file,
    newest_lineage,
)

DELTA = "model.delta"
WORTH_IT = 0.5
"""Share of the whole file's size. A larger delta saves less than fetching, unpacking and adding it costs."""


@dataclass(frozen=True)
class WeightExporter:
    """Writes versions below ``root``, one directory each; the newest ``keep`` of them stay.

    ``transfer``: whether workers can fetch a version as its difference to the one before.
    """

    root: Path
    keep: int
    transfer: Literal["full", "delta"] = "full"

    def export(
        self,
        tensors: dict[str, Tensor],
        texts: Mapping[str, str],
        version: PolicyVersion,
        step: int,
        now: float,
        adapter: WeightAdapter | None = None,
    ) -> str:
        """Write a version: the weights file (or the ``adapter``'s), ``texts`` (``config.json`` …) and the manifest.

        Returns:
            The manifest's sha256 in hex.

        Not synced to the disk: a restarted trainer publishes a new version in any case.

        Raises:
            DiskFull: the store's disk has no room for it.
            LateExport: the store has weights of a newer lineage, or this version already.
        """
        self._refuse_late(version)  # before anything large is written
        try:
            return self._export(tensors, texts, version, step, now, adapter)
        except (OSError, SafetensorError) as error:
            if not is_disk_full_error(error):
                raise
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise DiskFull(
                f"expected room for {needed / 1e6:,.1f} MB of weights in {self.root.absolute()} (version {version}), "
                f"got: no space left on the device, {shutil.disk_usage(self.root).free / 1e6:,.1f} MB free; "
                "make room, then start the same command again"
            ) from error

    def _export(
        self,
        tensors: dict[str, Tensor],
        texts: Mapping[str, str],
        version: PolicyVersion,
        step: int,
        now: float,
        adapter: WeightAdapter | None,
    ) -> str:
        weights = WEIGHTS if adapter is None else ADAPTER
        with appearing_directory(self.root / str(version)) as directory:
            save_file(tensors, directory / weights, metadata={"format": "pt"})
            for name, text in texts.items():
                (directory / name).write_text(text)
            manifest = WeightManifest(
                version=version,
                step=step,
                files=tuple(describe_file(directory / name) for name in (weights, *texts)),
                created_at=now,
                delta=self._difference(directory, version, _unit(tensors)) if self.transfer == "delta" else None,
                adapter=adapter,
            )
            content = manifest.model_dump_json().encode()
            (directory / MANIFEST).write_bytes(content)
            self._refuse_late(version)
        # After the new version has its name, so that there is always one to fetch.
        self._delete_old()
        return hashlib.sha256(content).hexdigest()

    def _refuse_late(self, version: PolicyVersion) -> None:
        if (newest := newest_lineage(self.root)) > version.lineage:
            raise LateExport(
                f"expected nothing newer than {version} in {self.root}, got weights of lineage {newest}: another "
                "trainer exports there by now; these weights were not kept"
            )

    def _difference(self, directory: Path, version: PolicyVersion, unit: int) -> WeightDelta | None:
        """Write the version's delta to the newest other one in the store; None if there is no other, or no gain."""
        base = next((found for found in reversed(self.versions()) if found != version), None)
        if base is None:
            return None
        before, whole = self.root / str(base), directory / WEIGHTS
        try:
            manifest = (before / MANIFEST).read_bytes()
            if (before / WEIGHTS).stat().st_size != whole.stat().st_size:
                return None  # another precision, as after a change of the settings
            if not write_delta(before / WEIGHTS, whole, unit, directory / DELTA, int(WORTH_IT * whole.stat().st_size)):
                return None
        except FileNotFoundError:
            return None  # files of the store may be deleted at any time
        return WeightDelta(
            file=describe_file(directory / DELTA),
            target=WEIGHTS,
            base=base,
            base_manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        )

    def _delete_old(self) -> None:
        for version in self.versions()[: -self.keep]:
            shutil.rmtree(self.root / str(version), ignore_errors=True)

    def versions(self) -> list[PolicyVersion]:
        """Complete versions, oldest first."""
        return complete_versions(self.root)


@contextmanager
def appearing_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``target`` when the block ends without an error. Not synced to the disk.

    Raises:
        LateExport: ``target`` exists, and stays; or a newer trainer deleted this directory as a leftover.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # A random suffix: two exports of one version must not write into the same directory.
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(target)  # fails if target is a directory with files
    except Exception as error:
        if not temporary.exists():
            raise LateExport(f"expected to write {target}, got it deleted half-way by another trainer") from error
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise LateExport(f"expected no {target} yet, found one, which is kept") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unit(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of one weight, by the size of number that makes up most of the tensors' bytes."""
    sizes: dict[int, int] = {}
    for tensor in tensors.values():
        sizes[tensor.itemsize] = sizes.get(tensor.itemsize, 0) + tensor.nbytes
    return max(sizes, key=lambda size: sizes[size], default=1)
