"""What an operator says of checkpoints: pins, which keep one from being pruned, and the rollback, where to go on.

Small documents beside the checkpoints, in a directory or an object store. There is one rollback, the last: what it
undid is told by lineage numbers, so a lineage that began after it needs no word of it.
"""

from collections.abc import Iterable
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from streamrl.consumers.training.checkpoints.storage import CheckpointStorage
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Part

PINS, ROLLBACK = "pins", "rollback"
MarkT = TypeVar("MarkT", bound=Part)


class Pin(Part):
    """A checkpoint that stays until it is unpinned. The document's name is the pin's."""

    version: PolicyVersion
    pinned_at: float


class Rollback(Part):
    """The run goes on from ``version``; all else that lineages up to ``lineage`` did after it is undone.

    ``lineage`` was claimed for the rollback, so that no trainer of an older one can write any more.
    """

    version: PolicyVersion
    lineage: Annotated[int, Field(ge=1)]
    restored_at: float


def read_pins(storage: CheckpointStorage) -> dict[str, Pin]:
    """All pins by their names.

    Raises:
        CheckpointError: they cannot be read.
    """
    try:
        found = {name: storage.note(f"{PINS}/{name}") for name in sorted(storage.notes(PINS))}
    except OSError as error:
        raise CheckpointError(f"expected to read the pins in {storage}, got: {error}") from error
    return {name: _decoded(Pin, data, f"{PINS}/{name}", storage) for name, data in found.items() if data is not None}


def read_rollback(storage: CheckpointStorage) -> Rollback | None:
    """The last rollback, if there was one.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        data = storage.note(ROLLBACK)
    except OSError as error:
        raise CheckpointError(f"expected to read whether {storage} was rolled back, got: {error}") from error
    return None if data is None else _decoded(Rollback, data, ROLLBACK, storage)


def pinned_versions(pins: Iterable[Pin]) -> frozenset[PolicyVersion]:
    """What is pinned."""
    return frozenset(PolicyVersion(*pin.version) for pin in pins)


def _decoded(kind: type[MarkT], data: bytes, name: str, storage: CheckpointStorage) -> MarkT:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise CheckpointError(
            f"expected a {kind.__name__.lower()} in {name}.json of {storage}, got {len(data)} bytes that are none; "
            "delete it, and say it again with `streamrl checkpoints`"
        ) from error
