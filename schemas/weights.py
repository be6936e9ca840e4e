"""A published set of weights: the files that a worker may fetch, with their checksums, and where they lie.

The weights store is a directory with one sub-directory per version, complete once its manifest is there.
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
"""Where relays serve, and workers keep, the versions of series beside the run's own, by name. The word is of what they
were first made for: processes of other versions ask for it.
"""
INCOMING = ".incoming-"
"""Begins the name of a version's directory while it arrives, at a worker and at a relay."""
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
"""How names begin, here and among checkpoints, of what is not there yet, or not any more."""
RUN = ".run"
"""File beside copies of versions that says whose they are."""
DIRECTORY = "directory"
"""What a relay is asked in the place of a file by who is of its host: where the version lies."""
BELOW = "Weights-Below"
"""Header of that answer, quoted as in a URL: the directory below which the version will lie once it is whole."""
WEIGHTS = "model.safetensors"
"""Of a version, or of a checkpoint, that holds all of the weights."""
ADAPTER = "adapter_model.safetensors"
"""Of a version, or of a checkpoint, that holds a low-rank adapter and not the whole of the weights."""
MAX_MANIFEST_BYTES = 1 << 20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WeightFileName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model|delta)$")
]


CHUNK_BYTES = 1 << 20
"""What a relay has to hold of a file before it passes it on: a chain of *p* relays takes (chunks + p - 1) / chunks as
long as one transfer, and a chunk is a few system calls."""
MAX_CHUNKS = 1 << 13
"""Of a file: their checks, eight characters each, leave a manifest room for a dozen files."""


class WeightFile(Part):
    """One file of a version: plain name (never a path), size in bytes, sha256 in hex.

    ``chunk_bytes`` and ``chunk_crc32``: the CRC-32 of each piece of that length, eight hex digits each, by which damage
    on the way is found before it is passed on; what was damaged on purpose, the sha256 finds. 0 and empty: not said.
    """

    name: WeightFileName
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256
    chunk_bytes: Annotated[int, Field(ge=0)] = 0
    chunk_crc32: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")] = ""

    def is_damaged(self, start: int, chunk: bytes | memoryview) -> bool:
        """Whether these bytes, a whole chunk that begins there, are not those of the file."""
        at = start // self.chunk_bytes * 8 if self.chunk_bytes else 0
        expected = self.chunk_crc32[at : at + 8]
        return bool(expected) and expected != f"{zlib.crc32(chunk):08x}"


class WeightDelta(Part):
    """How a file of the version before becomes the one of this version (``schemas/weight_deltas.py``).

    ``file``: what to fetch in place of the whole file, which is ``target`` among the manifest's files and can be
    fetched as well; ``base``: the version whose ``target`` it is applied to; ``base_manifest_sha256``: of its manifest.
    """

    file: WeightFile
    target: WeightFileName
    base: PolicyVersion
    base_manifest_sha256: Sha256


class WeightAdapter(Part):
    """The version is an adapter in peft's files: what a base model, which whoever uses it has, is to be added.

    ``base_sha256``: of the base's weights (``weights_sha256``); ``scale``: alpha / rank, by which B A is multiplied.
    """

    base_sha256: Sha256
    rank: Annotated[int, Field(ge=1)]
    scale: float


class WeightManifest(Part):
    """The content of ``manifest.json`` in a version's directory; written last, so its presence means complete.

    ``files``: all that makes up the version. ``delta``, if there is one, saves whoever has its base most of them.
    ``adapter``: the files hold an adapter; None: whole weights.
    """

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    files: tuple[WeightFile, ...]
    created_at: float
    delta: WeightDelta | None = None
    adapter: WeightAdapter | None = None


def weights_path(series: str = "") -> str:
    """Path at a relay below which the versions of a series are; without a name, those of the run's own."""
    return f"{SERIES}/{series}/weights" if series else "weights"


def checked_manifest(raw: bytes, version: PolicyVersion, sha256: str, where: str) -> WeightManifest:
    """What whoever fetches a version may rely on: that the bytes from ``where`` are its manifest, and make sense.

    Raises:
        ChecksumMismatch: they have another sha256 than what was announced.
        WeightsError: they are no manifest of this version.
    """
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise ChecksumMismatch(f"expected a manifest with sha256 {sha256} at {where}, got {found}")
    try:
        manifest = WeightManifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsError(f"expected a weights manifest at {where}, got: {error.errors()[0]['msg']}") from error
    names = {file.name for file in manifest.files}
    # A file named like the manifest would overwrite it when the version is put together.
    if manifest.version != version or len(names) != len(manifest.files) or MANIFEST in names:
        raise WeightsError(f"expected a manifest of {version} at {where}, got {manifest.version}: {sorted(names)}")
    if manifest.delta is not None and manifest.delta.target not in names:
        raise WeightsError(f"expected a delta of one of {sorted(names)} at {where}, got {manifest.delta.target!r}")
    return manifest


def describe_file(path: Path) -> WeightFile:
    """A file with its checksums, read once."""
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
        WeightsError: there are none.
    """
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise WeightsError(f"expected files of weights in {directory}, got none; give a model's directory")
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name} {sha256_of(path)}\n".encode())
    return whole.hexdigest()


def manifest_in(directory: Path) -> WeightManifest | None:
    """The manifest of a version's directory, which was checked when it was fetched; None where there is none."""
    try:
        return WeightManifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None


def chunk_bytes_of(size: int) -> int:
    """Length of the chunks of a file of that many bytes."""
    chunk_bytes = CHUNK_BYTES
    while chunk_bytes * MAX_CHUNKS < size:
        chunk_bytes *= 2
    return chunk_bytes


def _chunks(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            yield chunk


def run_noted(root: Path) -> str | None:
    """The id of the run whose versions a directory holds; None: nobody noted it."""
    noted = root / RUN
    return noted.read_text() if noted.exists() else None


def note_run(root: Path, run_id: str) -> None:
    """Note whose versions a directory holds. By a rename: processes that share it write the same, and read it whole."""
    written = root / f"{RUN}-{os.getpid()}"
    written.write_text(run_id)
    written.rename(root / RUN)


def version_in(name: str) -> PolicyVersion | None:
    """The version of a directory of this name, whole or incoming; None: it is not a version's."""
    try:
        return PolicyVersion.parse("-".join(name.removeprefix(INCOMING).split("-")[:2]))
    except ValueError:
        return None


def complete_versions(root: Path) -> list[PolicyVersion]:
    """Complete versions, oldest first."""
    found = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found.append(PolicyVersion.parse(manifest.parent.name))
        except ValueError:
            continue
    return sorted(found)


def merged_weight(weight: Any, a: Any, b: Any, scale: float) -> Any:
    """W + scale B A, of W [out, in], A [r, in] and B [out, r], in float32; in the type and on the device of W.

    The same for the workers' weights and for a merged checkpoint, to the bit. Tensors of torch, which nothing in this
    room imports.
    """
    product = (b.float() @ a.float()).to(weight.device)
    return (weight.float() + scale * product).to(weight.dtype)


def newest_lineage(root: Path) -> int:
    """The newest lineage of all that lies in a store, complete or not; 0 if nothing does."""
    lineages = [0]
    for path in root.glob("*-*"):
        try:
            lineages.append(PolicyVersion.parse(path.name).lineage)
        except ValueError:
            continue
    return max(lineages)
