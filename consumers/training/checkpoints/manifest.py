"""A checkpoint's manifest: the sealed file that says what the checkpoint holds. Knows no tensors and no storage.

The file is JSON whose last member is the sha256 of every byte before it, so no byte of it can change unnoticed. It also
lists every other file with its checksum. It is written last: once it is there, every file that it lists is there.
Files without a manifest are not a checkpoint.
"""

import hashlib
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from streamrl.consumers.ingest.ledger import KnownRecord
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.identifiers import PolicyVersion, named_version, policy_in
from streamrl.schemas.trajectories import Part
from streamrl.schemas.weights import Sha256

STATE = "trainer_state"
MANIFEST = "manifest.json"
CLEARED = b'{"cleared": "no manifest was here when a newer writer took the files away, and none can come any more"}\n'
"""Mark at a manifest's key in an object store. It is created like a manifest, so only one of the two can exist."""
MAX_MANIFEST_BYTES = 64 << 20
"""Far above any frontier's size; a larger file is not read into memory."""

_SEAL, _END = b',\n "sha256": "', b'"\n}'
_SEAL_BYTES = 64 + len(_END)  # a sha256 is 64 hex digits


def _inside(path: str) -> str:
    parts = path.split("/")
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"expected a relative path that stays in the checkpoint, got {path!r}")
    return path


CARD = "README.md"
"""A checkpoint's model card, for the hub and for people."""


class CheckpointFile(Part):
    """A file of the checkpoint; ``path`` is relative to the checkpoint."""

    path: Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_inside)]
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class SkipSummary(Part):
    """Skip rows: how many this lineage has written, their rolling hash, and counts by reason over the whole chain."""

    count: Annotated[int, Field(ge=0)] = 0
    hash: str = ""
    by_reason: dict[str, int] = Field(default_factory=dict)


class CheckpointManifest(Part):
    """What a checkpoint holds, and its place in the run.

    ``frontier``: for each partition, which records of the stream are finished; ``anchors``: for each partition, a
    record to recognise the topic by. ``parent``: the version that this lineage continued from (None: the initial
    model). ``run_id`` None: the checkpoint belongs to the run whose directory holds it. ``format``: releases that wrote
    2 cannot read the ended groups that 3 stores. They refuse 3, and continue from a checkpoint of format 2.
    """

    format: Literal[2, 3] = 3
    run: str
    run_id: str | None = None
    algorithm: str
    lineage: Annotated[int, Field(ge=0)]
    parent: PolicyVersion | None = None
    step: Annotated[int, Field(ge=0)]
    policy_version: PolicyVersion
    frontier: dict[str, JsonValue]
    anchors: dict[str, KnownRecord] = Field(default_factory=dict)
    skips: SkipSummary = Field(default_factory=SkipSummary)
    tokens_seen: Annotated[int, Field(ge=0)] = 0
    prompt_cursor: Annotated[int, Field(ge=0)] = 0
    config_hash: str
    created_at: float
    files: tuple[CheckpointFile, ...] = ()

    @property
    def account(self) -> str:
        """The name that its records are accounted under: an instance's, or the algorithm of the run's own trainer."""
        return policy_in(self.run) or self.algorithm

    @property
    def named_version(self) -> str:
        """The version as people read it."""
        return named_version(policy_in(self.run), self.policy_version)

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The bytes of the sealed file."""
    # The seal takes the place of the closing brace, as one more member, so that the file stays plain JSON.
    content = manifest.model_dump_json(indent=1).encode().removesuffix(b"\n}") + _SEAL
    return content + hashlib.sha256(content).hexdigest().encode() + _END


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Read a sealed file.

    Raises:
        CheckpointError: it is not a sealed manifest, a byte has changed, or its format is another one.
    """
    content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != hashlib.sha256(content).hexdigest().encode() + _END or not content.endswith(_SEAL):
        raise CheckpointError(f"expected a sealed manifest, got {len(data)} bytes whose seal does not match")
    try:
        # Unknown members, the seal among them, are ignored.
        return CheckpointManifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"expected a manifest of format 2 or 3, got one whose {place!r} is wrong: {first['msg']}"
        ) from error
