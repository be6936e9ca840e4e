"""Lineages, and which checkpoints a storage holds, by their manifests alone: their order, and which may go.

A lineage numbers one trainer process of a run. The newest number owns the run; an older holder must stop. Invariants:
- a_lineage_is_given_once: a number is claimed by creating something that must not exist;
- the_newest_lineage_leads: checkpoints are ordered by (lineage, step);
- nothing_of_a_newer_lineage_is_forgotten: a writer removes what its own chain has left behind, and nothing else;
- what_is_pinned_stays;
- a_rollback_holds_until_a_newer_lineage_has_a_checkpoint: what it undid is never gone on from by itself.

What an operator says of checkpoints are small documents beside them: pins, which keep one from being pruned, and the
rollback, where to go on. There is one rollback, the last: what it undid is told by lineage numbers, so a lineage that
began after it needs no word of it.
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


@dataclass(frozen=True)
class Lineage:
    """A claimed number, from 1, and where it was claimed. ``claim_id``: a name that no other claim has anywhere."""

    number: int
    storage: CheckpointStorage
    claim_id: str = ""

    def check(self) -> None:
        """Make sure that nobody has taken over.

        Raises:
            Superseded: a newer lineage exists.
            CheckpointError: the claims cannot be read.
        """
        try:
            newest = max(self.storage.claims(), default=0)
        except OSError as error:
            raise CheckpointError(
                f"expected to read the lineage claims in {self.storage}, got: {error}; "
                "without them this trainer cannot know whether another has taken over"
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
        # The listing is only where to begin: that a claim cannot be made twice is what decides between two starters.
        while not storage.claim(number, _claim_document(number, claim_id, now)):
            number += 1
    except OSError as error:
        raise CheckpointError(f"expected to claim a lineage in {storage}, got: {error}") from error
    return Lineage(number, storage, claim_id)


def _claim_document(number: int, claim_id: str, now: float) -> bytes:
    return json.dumps({"lineage": number, "claim_id": claim_id, "started_at": now}).encode()


def _claim_id(storage: CheckpointStorage, number: int) -> str:
    """Of the claim of a number; empty if there is none."""
    data = storage.note(f"{CLAIMS}/{number}")
    try:
        found = json.loads(data or b"{}")
    except ValueError:  # a crash came between the claim and its content: it was never used
        return ""
    return str(found.get("claim_id", "")) if isinstance(found, dict) else ""


@dataclass(frozen=True)
class CheckpointEntry:
    """A slot with what its manifest says; ``manifest`` None: there is no sound one, and ``problem`` says why."""

    slot: Slot
    manifest: CheckpointManifest | None
    problem: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Newest is largest; without a manifest the lineage may be unknown, and then the entry comes last."""
        if self.manifest is not None:
            return self.manifest.lineage, self.manifest.step
        return self.slot.lineage or 0, self.slot.step


def read_entries(storage: CheckpointStorage) -> list[CheckpointEntry]:
    """Everything in the storage that is named as a checkpoint, newest first.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    try:
        entries = [_read(storage, slot) for slot in storage.slots()]
    except OSError as error:
        raise CheckpointError(f"expected to list the checkpoints in {storage}, got: {error}") from error
    # A step that was tried twice may be there twice, whole both times.
    return sorted(
        entries, key=lambda each: (each.order, each.manifest.created_at if each.manifest else 0), reverse=True
    )


def read_manifests(storage: CheckpointStorage | str | Path) -> list[CheckpointManifest]:
    """The sound manifests, newest first; the files they name are not looked at.

    Raises:
        CheckpointError: the storage cannot be read.
        SettingsError: the text names no storage.
    """
    if isinstance(storage, str | Path):
        storage = open_storage(storage, Path())  # no cache: manifests are read in place, nothing is fetched
    return _sound(read_entries(storage))


def _sound(entries: Iterable[CheckpointEntry]) -> list[CheckpointManifest]:
    found = []
    for entry in entries:
        if entry.manifest is None:
            log.warning("checkpoint has no sound manifest", problem=entry.problem)
        else:
            found.append(entry.manifest)
    return found


@dataclass(frozen=True)
class HeldCheckpoints:
    """What a place knows of its run. ``lineage``: the newest one claimed or checkpointed, also by a rollback; 0: none.

    ``newest``: the checkpoint that a start would go on from. ``claim_id``: of the lineage that was asked for, if that
    was claimed here.
    """

    place: str
    lineage: int = 0
    newest: CheckpointManifest | None = None
    claim_id: str = ""

    @property
    def run_id(self) -> str | None:
        """Of the run that the newest checkpoint belongs to, if it says so."""
        return self.newest.run_id if self.newest is not None else None


def held_in(storage: CheckpointStorage, claimed: int = 0) -> HeldCheckpoints:
    """What is claimed and kept in a place, and by which claim lineage ``claimed``. Reads only.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    entries = read_entries(storage)
    try:
        claims = storage.claims()
        claim_id = _claim_id(storage, claimed) if claimed in claims else ""
    except OSError as error:
        raise CheckpointError(f"expected to read the lineage claims in {storage}, got: {error}") from error
    lineage = max([0, *claims, *(manifest.lineage for manifest in _sound(entries))])
    first = _first_whole(resumable(entries, read_rollback(storage)))
    return HeldCheckpoints(str(storage), lineage, None if first is None else first[1], claim_id)


def resumable(entries: Sequence[CheckpointEntry], rollback: Rollback | None) -> list[CheckpointEntry]:
    """What a start may go on from, newest first; damaged ones among them. ``entries``: all of them, newest first.

    Raises:
        CheckpointError: the checkpoint that the run was rolled back to is gone, and no newer lineage has one.
    """
    if rollback is None:
        return list(entries)
    # Every lineage above the rollback's own began after it, and so goes on from where it led.
    newer = [entry for entry in entries if entry.order[0] > rollback.lineage]
    chosen = next((entry for entry in entries if entry.order == rollback.version and entry.manifest is not None), None)
    if chosen is None or chosen.manifest is None:
        if any(entry.manifest is not None for entry in newer):
            return newer  # pruned, as any checkpoint is that has successors
        raise CheckpointError(
            f"expected checkpoint {PolicyVersion(*rollback.version)}, to which this run was rolled back, got none that "
            "is whole; choose another with `streamrl checkpoints restore`"
        )
    chain = _Chain([entry.manifest for entry in entries if entry.manifest is not None], chosen.manifest)
    older = [
        entry
        for entry in entries
        if entry.order < chosen.order and (entry.manifest is None or not chain.left_behind(entry.manifest))
    ]
    return [*newer, chosen, *older]


def next_start(storage: CheckpointStorage | str | Path) -> CheckpointManifest | None:
    """The manifest that a start would go on from if its files verify, or none if there is none.

    Raises:
        CheckpointError: the storage cannot be read.
        SettingsError: the text names no storage.
    """
    if isinstance(storage, str | Path):
        storage = open_storage(storage, Path())
    found = _first_whole(resumable(read_entries(storage), read_rollback(storage)))
    return None if found is None else found[1]


def newest_model(location: str | Path, cache: Path) -> Path | None:
    """The directory of the checkpoint that a start would go on from, for ``from_pretrained``; None if there is none.

    Out of an object store it comes into ``cache``. Its files are not verified.

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


def superfluous(
    entries: Iterable[CheckpointEntry],
    written: CheckpointManifest,
    keep: int,
    pinned: Collection[tuple[int, int]] = frozenset(),
) -> list[Slot]:
    """What may go after ``written``: abandoned futures, all but the newest ``keep``, and damaged ones around them.

    ``entries``: newest first, ``written`` among them. ``pinned``: versions that stay whatever else is said.
    """
    # Entries of newer lineages are another trainer's, which this one has not been told of yet: they are not touched.
    own = [entry for entry in entries if entry.order[0] <= written.lineage]
    chain = _Chain([entry.manifest for entry in own if entry.manifest is not None], written)
    kept = [entry for entry in own if entry.manifest is not None and not chain.left_behind(entry.manifest)][:keep]
    # What was just written is gone: a newer trainer has taken it away while this one stood still.
    if not kept:
        return []
    # A damaged one between the kept ones may be mended by hand, and fallen back on; older ones are of no use.
    oldest = min(entry.slot.step for entry in kept)
    damaged = [e for e in own if e.manifest is None and oldest < e.slot.step <= written.step]
    held = [entry for entry in own if _is_pinned(entry, pinned)]
    staying = {entry.slot for entry in (*kept, *damaged, *held)}
    return [entry.slot for entry in own if entry.slot not in staying]


def _is_pinned(entry: CheckpointEntry, pinned: Collection[tuple[int, int]]) -> bool:
    # Of a damaged one the lineage may be unknown: then it stays for any pin of its step.
    if entry.manifest is None and entry.slot.lineage is None:
        return any(step == entry.slot.step for _, step in pinned)
    return entry.order in pinned


class _Chain:
    """The lineage of one manifest and its ancestors, each up to the step that its child went on from."""

    def __init__(self, manifests: Iterable[CheckpointManifest], newest: CheckpointManifest) -> None:
        parents = {manifest.lineage: manifest.parent for manifest in manifests}
        self._last_steps = {newest.lineage: newest.step}
        # From child to parent; where a parent's manifest is gone, the chain is known no further.
        parent = newest.parent
        # A lineage that is met again would be a circle of manifests, which must not hold this loop.
        while parent is not None and parent.lineage not in self._last_steps:
            self._last_steps[parent.lineage] = parent.number
            parent = parents.get(parent.lineage)

    def left_behind(self, manifest: CheckpointManifest) -> bool:
        """Whether the chain does not lead through this checkpoint; what is older than all that is known of it stays."""
        if manifest.lineage in self._last_steps:
            return manifest.step > self._last_steps[manifest.lineage]
        # Along a chain lineages and steps only grow, so an ancestor that is not known of is below both minima.
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
            slot, None, f"expected {address} to hold its own checkpoint, got that of step {manifest.step}"
        )
    return CheckpointEntry(slot, manifest)
