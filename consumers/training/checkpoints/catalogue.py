"""Lineages, and the checkpoints of a storage as their manifests describe them: their order, and which can be deleted.

A lineage numbers one trainer process of a run. The newest number owns the run; an older holder must stop. Invariants:
- a_lineage_number_is_claimed_once: a claim creates an object that must not exist;
- the_newest_lineage_comes_first: checkpoints are ordered by (lineage, step);
- checkpoints_of_a_newer_lineage_are_kept: a writer deletes only checkpoints that its own lineage and ancestors no
  longer need;
- pinned_checkpoints_are_kept;
- a_rollback_holds_until_a_newer_lineage_has_a_checkpoint: no start continues from a checkpoint that it undid.

An operator's decisions are small documents next to the checkpoints: pins, which protect a checkpoint from pruning, and
the rollback, which says where to continue. Only the last rollback is kept. It names undone checkpoints by lineage
numbers, so lineages that started after it are not affected.
"""

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import structlog
from pydantic import Field, ValidationError

from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest, decode_manifest
from streamrl.consumers.training.checkpoints.storage import CLAIMS, CheckpointStorage, Slot, open_storage
from streamrl.schemas.errors import CheckpointError, Superseded
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Part

log = structlog.get_logger()

PINS, ROLLBACK = "pins", "rollback"
MarkT = TypeVar("MarkT", bound=Part)


class Pin(Part):
    """A checkpoint that is kept until it is unpinned. The document's name is the pin's."""

    version: PolicyVersion
    pinned_at: float


class Rollback(Part):
    """The run continues from ``version``; everything else that lineages up to ``lineage`` did after it is undone.

    ``lineage`` was claimed for the rollback, so that no trainer of an older lineage can write any more.
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
    """The versions that are pinned."""
    return frozenset(PolicyVersion(*pin.version) for pin in pins)


def _decoded(kind: type[MarkT], data: bytes, name: str, storage: CheckpointStorage) -> MarkT:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise CheckpointError(
            f"expected a {kind.__name__.lower()} in {name}.json of {storage}, got {len(data)} bytes of something else; "
            "delete the file, and pin or restore again with `streamrl checkpoints`"
        ) from error


@dataclass(frozen=True)
class Lineage:
    """A claimed number, from 1, and where it was claimed. ``claim_id``: a name that no other claim has."""

    number: int
    storage: CheckpointStorage
    claim_id: str = ""

    def check(self) -> None:
        """Check that no other trainer has taken over.

        Raises:
            Superseded: a newer lineage exists.
            CheckpointError: the claims cannot be read.
        """
        try:
            newest = max(self.storage.claims(), default=0)
        except OSError as error:
            raise CheckpointError(
                f"expected to read the lineage claims in {self.storage}, got: {error}; "
                "without them this trainer cannot know whether another one has taken over"
            ) from error
        if newest > self.number:
            raise Superseded(
                f"expected lineage {self.number} to be the newest in {self.storage}, found {newest}: "
                "superseded, another trainer has taken over this run; let it go on"
            )


def claim_lineage(storage: CheckpointStorage, *, at_least: int, now: float) -> Lineage:
    """Claim the number after the largest one claimed, and after ``at_least - 1``; ``now``: seconds since the epoch.

    Raises:
        CheckpointError: the storage cannot be written to.
    """
    claim_id = str(uuid.uuid4())
    try:
        number = max([at_least, *(claimed + 1 for claimed in storage.claims())])
        # The listing is only a first guess. Between two starts the claim decides, since it can be made only once.
        while not storage.claim(number, _claim_document(number, claim_id, now)):
            number += 1
    except OSError as error:
        raise CheckpointError(f"expected to claim a lineage in {storage}, got: {error}") from error
    return Lineage(number, storage, claim_id)


def _claim_document(number: int, claim_id: str, now: float) -> bytes:
    return json.dumps({"lineage": number, "claim_id": claim_id, "started_at": now}).encode()


def _claim_id(storage: CheckpointStorage, number: int) -> str:
    """The id of the claim of a number; empty if there is none."""
    data = storage.note(f"{CLAIMS}/{number}")
    try:
        found = json.loads(data or b"{}")
    except ValueError:  # a crash came between the claim and its content, so the claim was never used
        return ""
    return str(found.get("claim_id", "")) if isinstance(found, dict) else ""


@dataclass(frozen=True)
class CheckpointEntry:
    """A slot and its manifest; ``manifest`` None: there is no valid one, and ``problem`` says why."""

    slot: Slot
    manifest: CheckpointManifest | None
    problem: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """The newest is largest; without a manifest the lineage may be unknown, and then the entry is the smallest."""
        if self.manifest is not None:
            return self.manifest.lineage, self.manifest.step
        return self.slot.lineage or 0, self.slot.step


def read_entries(storage: CheckpointStorage) -> list[CheckpointEntry]:
    """Everything in the storage that has a checkpoint's name, newest first.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    try:
        entries = [_read(storage, slot) for slot in storage.slots()]
    except OSError as error:
        raise CheckpointError(f"expected to list the checkpoints in {storage}, got: {error}") from error
    # A step that was tried twice may have two complete checkpoints.
    return sorted(
        entries, key=lambda each: (each.order, each.manifest.created_at if each.manifest else 0), reverse=True
    )


def read_manifests(storage: CheckpointStorage | str | Path) -> list[CheckpointManifest]:
    """The valid manifests, newest first; the files that they list are not checked.

    Raises:
        CheckpointError: the storage cannot be read.
        SettingsError: the text names no storage.
    """
    if isinstance(storage, str | Path):
        storage = open_storage(storage, Path())  # no cache: manifests are read in place
    return _valid_manifests(read_entries(storage))


def _valid_manifests(entries: Iterable[CheckpointEntry]) -> list[CheckpointManifest]:
    found = []
    for entry in entries:
        if entry.manifest is None:
            log.warning("checkpoint has no valid manifest", problem=entry.problem)
        else:
            found.append(entry.manifest)
    return found


@dataclass(frozen=True)
class CheckpointsState:
    """What a storage knows of its run.

    ``lineage``: the newest that was claimed, also by a rollback, or has a checkpoint; 0: none. ``place``: the storage,
    for messages. ``newest``: the checkpoint that a start would continue from. ``claim_id``: the claim of the lineage in
    question; empty if that was not claimed here.
    """

    place: str
    lineage: int = 0
    newest: CheckpointManifest | None = None
    claim_id: str = ""

    @property
    def run_id(self) -> str | None:
        """The run that the newest checkpoint belongs to, if its manifest says so."""
        return self.newest.run_id if self.newest is not None else None


def read_checkpoints_state(storage: CheckpointStorage, claimed: int = 0) -> CheckpointsState:
    """The claims and checkpoints of a storage, with the claim's id of lineage ``claimed``. Reads only.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    entries = read_entries(storage)
    try:
        claims = storage.claims()
        claim_id = _claim_id(storage, claimed) if claimed in claims else ""
    except OSError as error:
        raise CheckpointError(f"expected to read the lineage claims in {storage}, got: {error}") from error
    lineage = max([0, *claims, *(manifest.lineage for manifest in _valid_manifests(entries))])
    first = _first_whole(resumable(entries, read_rollback(storage)))
    return CheckpointsState(str(storage), lineage, None if first is None else first[1], claim_id)


def resumable(entries: Sequence[CheckpointEntry], rollback: Rollback | None) -> list[CheckpointEntry]:
    """The entries that a start may continue from, newest first, damaged ones included. ``entries``: all, newest first.

    Raises:
        CheckpointError: the checkpoint that the run was rolled back to is missing, and no newer lineage has one.
    """
    if rollback is None:
        return list(entries)
    # Every lineage above the rollback's own started after it, and so continued from the chosen checkpoint.
    newer = [entry for entry in entries if entry.order[0] > rollback.lineage]
    chosen = next((entry for entry in entries if entry.order == rollback.version and entry.manifest is not None), None)
    if chosen is None or chosen.manifest is None:
        if any(entry.manifest is not None for entry in newer):
            return newer  # the chosen one was pruned, as any checkpoint with successors may be
        raise CheckpointError(
            f"expected checkpoint {PolicyVersion(*rollback.version)}, to which this run was rolled back, found no "
            "complete one; choose another with `streamrl checkpoints restore CHECKPOINT --run RUN`"
        )
    chain = _Chain([entry.manifest for entry in entries if entry.manifest is not None], chosen.manifest)
    older = [
        entry
        for entry in entries
        if entry.order < chosen.order and (entry.manifest is None or not chain.is_abandoned(entry.manifest))
    ]
    return [*newer, chosen, *older]


def next_start(storage: CheckpointStorage | str | Path) -> CheckpointManifest | None:
    """The manifest that a start would continue from if its files verify; None if there is none.

    Raises:
        CheckpointError: the storage cannot be read.
        SettingsError: the text names no storage.
    """
    if isinstance(storage, str | Path):
        storage = open_storage(storage, Path())
    found = _first_whole(resumable(read_entries(storage), read_rollback(storage)))
    return None if found is None else found[1]


def newest_model(location: str | Path, cache: Path) -> Path | None:
    """The directory of the checkpoint that a start would continue from, for ``from_pretrained``; None if there is none.

    A checkpoint in an object store is downloaded into ``cache``. Its files are not verified.

    Raises:
        CheckpointError: the storage cannot be read.
        SettingsError: the text names no storage.
    """
    storage = open_storage(location, cache)
    found = _first_whole(resumable(read_entries(storage), read_rollback(storage)))
    if found is None:
        return None
    slot, manifest = found
    try:
        return storage.fetch(slot, manifest)
    except OSError as error:
        raise CheckpointError(f"expected to fetch {storage.address(slot)}, got: {error}") from error


def _first_whole(entries: Iterable[CheckpointEntry]) -> tuple[Slot, CheckpointManifest] | None:
    return next(((entry.slot, entry.manifest) for entry in entries if entry.manifest is not None), None)


def prunable_slots(
    entries: Iterable[CheckpointEntry],
    written: CheckpointManifest,
    keep: int,
    pinned: Collection[tuple[int, int]] = frozenset(),
) -> list[Slot]:
    """Slots that can be deleted once ``written`` is there: all but the newest ``keep`` of its lineage and ancestors.

    These are older checkpoints, checkpoints of abandoned lineages, and damaged ones around them. ``entries``: newest
    first, ``written`` among them. ``pinned``: versions that are kept in any case.
    """
    # Entries of newer lineages belong to another trainer that this one does not know of yet: they are kept.
    own = [entry for entry in entries if entry.order[0] <= written.lineage]
    chain = _Chain([entry.manifest for entry in own if entry.manifest is not None], written)
    kept = [entry for entry in own if entry.manifest is not None and not chain.is_abandoned(entry.manifest)][:keep]
    # The checkpoint just written is missing: a newer trainer has removed it while this one was suspended.
    if not kept:
        return []
    # A damaged one between the kept ones may be repaired by hand, and used as a fallback; older ones are of no use.
    oldest = min(entry.slot.step for entry in kept)
    damaged = [e for e in own if e.manifest is None and oldest < e.slot.step <= written.step]
    held = [entry for entry in own if _is_pinned(entry, pinned)]
    staying = {entry.slot for entry in (*kept, *damaged, *held)}
    return [entry.slot for entry in own if entry.slot not in staying]


def _is_pinned(entry: CheckpointEntry, pinned: Collection[tuple[int, int]]) -> bool:
    # The lineage of a damaged one may be unknown: then any pin of its step keeps it.
    if entry.manifest is None and entry.slot.lineage is None:
        return any(step == entry.slot.step for _, step in pinned)
    return entry.order in pinned


class _Chain:
    """The lineage of one manifest and its ancestors, each up to the step that its child continued from."""

    def __init__(self, manifests: Iterable[CheckpointManifest], newest: CheckpointManifest) -> None:
        parents = {manifest.lineage: manifest.parent for manifest in manifests}
        self._last_steps = {newest.lineage: newest.step}
        # From child to parent, until a parent's manifest is missing.
        parent = newest.parent
        # A lineage seen before would mean a cycle of manifests, which must not make this loop endless.
        while parent is not None and parent.lineage not in self._last_steps:
            self._last_steps[parent.lineage] = parent.number
            parent = parents.get(parent.lineage)

    def is_abandoned(self, manifest: CheckpointManifest) -> bool:
        """Whether the chain does not pass through this checkpoint; false for one older than the known chain."""
        if manifest.lineage in self._last_steps:
            return manifest.step > self._last_steps[manifest.lineage]
        # Along a chain lineages and steps only grow, so an unknown ancestor is below both minima.
        return manifest.lineage > min(self._last_steps) or manifest.step > min(self._last_steps.values())


def _read(storage: CheckpointStorage, slot: Slot) -> CheckpointEntry:
    address = storage.address(slot)
    data = storage.manifest(slot)
    if data is None:
        return CheckpointEntry(slot, None, f"expected a manifest in {address}, found none")
    try:
        manifest = decode_manifest(data)
    except CheckpointError as error:
        return CheckpointEntry(slot, None, f"{address}: {error}")
    if (slot.step, slot.lineage or manifest.lineage) != (manifest.step, manifest.lineage):
        return CheckpointEntry(
            slot, None, f"expected {address} to hold the checkpoint of its name, got that of step {manifest.step}"
        )
    return CheckpointEntry(slot, manifest)
