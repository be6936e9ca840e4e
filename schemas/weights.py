"""A published set of weights: the files that a worker may fetch, their checksums and their places.

The weights store is a directory with one sub-directory per version. A version is complete once its manifest exists.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from streamrl.schemas.errors import ChecksumMismatch, WeightsError
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Part

SERIES = "arms"
"""Path part under which relays serve, and workers keep, other series than the run's own, by name.

The word comes from their first use. It stays, because processes of other releases ask for it.
"""
INCOMING_PREFIX = ".incoming-"
"""Prefix of a version's directory while the version arrives, at a worker or a relay."""
MANIFEST = "manifest.json"
TEMPORARY_PREFIX = ".tmp-"
"""Prefix of names of incomplete or deleted entries, in the weights store and among checkpoints."""
RUN = ".run"
"""File next to copies of versions that holds their run's id."""
DIRECTORY = "directory"
"""Name that a process on the relay's host requests instead of a file, to get the version's directory."""
BELOW = "Weights-Below"
"""Header of the answer to that request: the parent of the version's directory, which the relay may still be filling.

Its value is quoted as in a URL.
"""
WEIGHTS = "model.safetensors"
"""File of a version or checkpoint that holds all weights."""
ADAPTER = "adapter_model.safetensors"
"""File of a version or checkpoint that holds only a low-rank adapter."""
MAX_MANIFEST_BYTES = 1 << 20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WeightFileName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model|delta)$")
]


CHUNK_BYTES = 1 << 20
"""Bytes of a file that a relay must hold before it forwards them.

A chain of *p* relays takes (chunks + p - 1) / chunks times as long as one transfer. A chunk costs a few system calls.
"""
MAX_CHUNKS = 1 << 13
"""Most chunks of a file. A chunk's checksum takes eight characters, so a manifest has room for a dozen files."""


class WeightFile(Part):
    """One file of a version: plain name (never a path), size in bytes, sha256 in hex.

    ``chunk_crc32`` holds the CRC-32 of each ``chunk_bytes`` of the file, eight hex digits each. With it, a relay finds
    transfer damage before it forwards a chunk; the sha256 finds deliberate damage too. 0 and empty mean: not given.
    """

    name: WeightFileName
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256
    chunk_bytes: Annotated[int, Field(ge=0)] = 0
    chunk_crc32: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")] = ""

    def is_damaged(self, start: int, chunk: bytes | memoryview) -> bool:
        """Whether ``chunk``, a whole chunk that starts at byte ``start``, differs from the file's."""
        at = start // self.chunk_bytes * 8 if self.chunk_bytes else 0
        expected = self.chunk_crc32[at : at + 8]
        return bool(expected) and expected != f"{zlib.crc32(chunk):08x}"


class WeightDelta(Part):
    """A difference that turns an earlier version's file into this version's (``schemas/weight_deltas.py``).

    ``file`` is the difference to fetch instead of the whole file. ``target`` is the whole file's name in the manifest;
    it can be fetched too. ``base`` is the version whose ``target`` the difference is applied to, and
    ``base_manifest_sha256`` the sha256 of that version's manifest.
    """

    file: WeightFile
    target: WeightFileName
    base: PolicyVersion
    base_manifest_sha256: Sha256


class WeightAdapter(Part):
    """Marks a version as an adapter in peft's files, to be added to a base model that the reader already has.

    ``base_sha256``: ``weights_sha256`` of the base model; ``scale``: alpha / rank, the factor of B A.
    """

    base_sha256: Sha256
    rank: Annotated[int, Field(ge=1)]
    scale: float


class WeightManifest(Part):
    """The content of ``manifest.json`` in a version's directory. It is written last, so a version with it is complete.

    ``files``: all files of the version. ``delta``: a difference that saves a process with its base most of the
    download. ``adapter``: set if the files hold an adapter; None for whole weights.
    """

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    files: tuple[WeightFile, ...]
    created_at: float
    delta: WeightDelta | None = None
    adapter: WeightAdapter | None = None


def weights_path(series: str = "") -> str:
    """Path at a relay below which the versions of a series are; without a name, those of the run's own series."""
    return f"{SERIES}/{series}/weights" if series else "weights"


def checked_manifest(raw: bytes, version: PolicyVersion, sha256: str, where: str) -> WeightManifest:
    """The manifest in bytes that were fetched from ``where``, after all checks that a reader relies on.

    Raises:
        ChecksumMismatch: the bytes do not have the announced sha256.
        WeightsError: the bytes are no consistent manifest of this version.
    """
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ChecksumMismatch(f"expected a manifest with sha256 {sha256} at {where}, got {found}")
    try:
        manifest = WeightManifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsError(f"expected a weights manifest at {where}, got: {error.errors()[0]['msg']}") from error
    names = {file.name for file in manifest.files}
    # A file named like the manifest would overwrite it in the version's directory.
    if manifest.version != version or len(names) != len(manifest.files) or MANIFEST in names:
        raise WeightsError(f"expected a manifest of {version} at {where}, got {manifest.version}: {sorted(names)}")
    if manifest.delta is not None and manifest.delta.target not in names:
        raise WeightsError(f"expected a delta of one of {sorted(names)} at {where}, got {manifest.delta.target!r}")
    return manifest


def describe_file(path: Path) -> WeightFile:
    """A manifest's entry for a file: its size and checksums. The file is read once."""
    size = path.stat().st_size
    chunk_bytes = chunk_bytes_of(size)
    digest, checks = hashlib.sha256(), []
    for chunk in _chunks(path, chunk_bytes):
        digest.update(chunk)
        checks.append(f"{zlib.crc32(chunk):08x}")
    return WeightFile(
        name=path.name, size=size, sha256=digest.hexdigest(), chunk_bytes=chunk_bytes, chunk_crc32="".join(checks)
    )


def weights_sha256(directory: Path) -> str:
    """Identity of a model's weights in a directory: sha256, in hex, over the names and sha256 of their files.

    Raises:
        WeightsError: the directory has no weight files.
    """
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise WeightsError(f"expected *.safetensors or *.bin files in {directory}, got none; give a model's directory")
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name} {sha256_of(path)}\n".encode())
    return whole.hexdigest()


def manifest_in(directory: Path) -> WeightManifest | None:
    """The manifest in a version's directory, which was checked when it was fetched; None if there is none."""
    try:
        return WeightManifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None


def chunk_bytes_of(size: int) -> int:
    """Bytes of each chunk of a file of ``size`` bytes."""
    chunk_bytes = CHUNK_BYTES
    while chunk_bytes * MAX_CHUNKS < size:
        chunk_bytes *= 2
    return chunk_bytes


def _chunks(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            yield chunk


def read_run_id(root: Path) -> str | None:
    """The id of the run whose versions a directory holds; None if it was not recorded."""
    noted = root / RUN
    return noted.read_text() if noted.exists() else None


def write_run_id(root: Path, run_id: str) -> None:
    """Record the run whose versions a directory holds.

    A rename makes the write atomic, because processes that share the directory all write the same id and read it.
    """
    written = root / f"{RUN}-{os.getpid()}"
    written.write_text(run_id)
    written.rename(root / RUN)


def version_in(name: str) -> PolicyVersion | None:
    """The version that a directory name belongs to, complete or incoming; None if it is no version's directory."""
    try:
        return PolicyVersion.parse("-".join(name.removeprefix(INCOMING_PREFIX).split("-")[:2]))
    except ValueError:
        return None


def complete_versions(root: Path) -> list[PolicyVersion]:
    """Complete versions in a store, oldest first."""
    found = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found.append(PolicyVersion.parse(manifest.parent.name))
        except ValueError:
            continue
    return sorted(found)


def merged_weight(weight: Any, a: Any, b: Any, scale: float) -> Any:
    """W + scale B A for W [out, in], A [r, in] and B [out, r]; computed in float32, returned in W's type on W's device.

    Workers' weights and a merged checkpoint are equal to the bit. The arguments are tensors of torch, which this
    package does not import.
    """
    product = (b.float() @ a.float()).to(weight.device)
    return (weight.float() + scale * product).to(weight.dtype)


def newest_lineage(root: Path) -> int:
    """The newest lineage among all versions in a store, complete or not; 0 if the store is empty."""
    lineages = [0]
    for path in root.glob("*-*"):
        try:
            lineages.append(PolicyVersion.parse(path.name).lineage)
        except ValueError:
            continue
    return max(lineages)
