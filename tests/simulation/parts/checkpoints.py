"""Checkpoints in memory, with the production rules of naming, order, fencing and pruning, written piece by piece.

``before_write`` is called before every piece that becomes durable, with its name; it may raise ``Killed`` (the process
dies there) or ``OSError``. So a checkpoint can break off at every one of its writes.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streamrl.consumers.training.checkpoints.catalogue import (
    CheckpointsState,
    Lineage,
    claim_lineage,
    pinned_versions,
    prunable_slots,
    read_checkpoints_state,
    read_entries,
    read_manifests,
    read_pins,
    read_rollback,
    resumable,
)
from streamrl.consumers.training.checkpoints.manifest import (
    CLEARED,
    CheckpointManifest,
    decode_manifest,
    encode_manifest,
)
from streamrl.consumers.training.checkpoints.storage import CLAIMS, Slot
from streamrl.consumers.training.identity_store import MemoryIdentity
from streamrl.schemas.errors import CheckpointError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef

Contents = tuple[RecordRef, ...]
PIECES = ("contents", "reader", "report")
BeforeWrite = Callable[[str], None]
Pause = Callable[[], Awaitable[None]]


async def at_once() -> None:
    """A pause that is none."""


@dataclass(frozen=True)
class SavedPieces:
    """What a checkpoint holds: the model's contents, the reader's snapshot, the report."""

    contents: Contents
    reader: str
    report: bytes


@dataclass
class MemoryPlace:
    """The disk or object store; survives every process. ``by_lineage``: names as an object store has them.

    ``staged``: what writers of a lineage have not named yet, on a disk; ``replaced``: what they are replacing there;
    ``documents``: what an operator said, and the claims.
    """

    by_lineage: bool
    numbers: set[int] = field(default_factory=set)
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)
    slots_by_name: dict[str, Slot] = field(default_factory=dict)
    staged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    replaced: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, bytes] = field(default_factory=dict)
    scratch: Path = Path()

    def __str__(self) -> str:
        return "memory"

    def claims(self) -> list[int]:
        """Numbers claimed so far."""
        return list(self.numbers)

    def claim(self, number: int, content: bytes) -> bool:
        """Claim a number."""
        is_free = number not in self.numbers
        self.numbers.add(number)
        if is_free:
            self.documents[f"{CLAIMS}/{number}"] = content
        return is_free

    def clear_leftovers(self, lineage: int) -> None:
        """Take away what older writers have not finished, and put back what they were replacing."""
        self.staged = [(writer, pieces) for writer, pieces in self.staged if writer >= lineage]
        for writer, name in [each for each in self.replaced if each[0] < lineage]:
            self.pieces.setdefault(name, self.replaced.pop((writer, name)))
        self._sweep(lambda slot: (slot.lineage or 0) < lineage)

    def _sweep(self, is_left: Callable[[Slot], bool]) -> None:
        """Uploads that never ended go, and leave a mark that their manifest cannot be put over."""
        for name, pieces in self.pieces.items():
            if pieces.get("manifest", CLEARED) == CLEARED and is_left(self.slots_by_name[name]):
                self.pieces[name] = {"manifest": CLEARED}

    def slot(self, lineage: int, step: int) -> Slot:
        """Where a checkpoint belongs."""
        return Slot(f"lineage_{lineage}/step_{step}", step, lineage) if self.by_lineage else Slot(f"step_{step}", step)

    def slots(self) -> list[Slot]:
        """Places with a manifest; the others are uploads that never ended."""
        return [
            self.slots_by_name[name]
            for name, pieces in self.pieces.items()
            if pieces.get("manifest", CLEARED) != CLEARED
        ]

    def aside(self, slot: Slot, lineage: int) -> Slot:
        """On a disk, under a name that no trainer writes to."""
        return slot if self.by_lineage else Slot(f"step_{slot.step}-lineage_{lineage}", slot.step, lineage)

    def set_aside(self, slot: Slot, lineage: int) -> None:
        """By one rename."""
        aside = self.aside(slot, lineage)
        if aside != slot:
            self.slots_by_name[aside.name] = aside
            self.pieces[aside.name] = self.pieces.pop(slot.name)

    def contents(self, slot: Slot, path: str) -> Iterator[bytes]:
        """There are no files."""
        raise AssertionError("a simulated checkpoint has no files")

    def note(self, name: str) -> bytes | None:
        """A pin or the rollback."""
        return self.documents.get(name)

    def notes(self, folder: str) -> list[str]:
        """Names of the pins."""
        return [name.removeprefix(f"{folder}/") for name in self.documents if name.startswith(f"{folder}/")]

    def put_note(self, name: str, content: bytes) -> None:
        """Written at once."""
        self.documents[name] = content

    def remove_note(self, name: str) -> None:
        """Forget it."""
        self.documents.pop(name, None)

    def damage_newest(self) -> bool:
        """Change a byte of the newest manifest, if there is an older checkpoint to fall back on."""
        # An operator who restored one and loses it chooses another; nobody does here.
        entries = [entry for entry in resumable(read_entries(self), read_rollback(self)) if entry.manifest is not None]
        rollback = read_rollback(self)
        if len(entries) < 2 or (rollback is not None and entries[0].order == rollback.version):
            return False
        pieces = self.pieces[entries[0].slot.name]
        pieces["manifest"] = b"[" + pieces["manifest"][1:]
        return True

    def address(self, slot: Slot) -> str:
        """Its name."""
        return slot.name

    def manifest(self, slot: Slot) -> bytes | None:
        """The manifest's bytes, if there is one."""
        data: bytes | None = self.pieces.get(slot.name, {}).get("manifest")
        return data

    @contextmanager
    def staging(self, slot: Slot, lineage: int) -> Iterator[Path]:
        """There are no files."""
        yield Path()

    def secure(self, staged: Path) -> None:
        """There are no files."""
        raise AssertionError("a simulated checkpoint has no files")

    def publish(self, slot: Slot, staged: Path, manifest: CheckpointManifest, fence: Callable[[], None]) -> Slot:
        """See ``put``, which takes pieces instead of files."""
        raise AssertionError("a simulated checkpoint has no files")

    def fetch(self, slot: Slot, manifest: CheckpointManifest) -> Path:
        """There are no files."""
        raise AssertionError("a simulated checkpoint has no files")

    def remove(self, slot: Slot) -> None:
        """Forget a checkpoint."""
        self.pieces.pop(slot.name, None)

    async def put(
        self,
        slot: Slot,
        saved: SavedPieces,
        manifest: CheckpointManifest,
        fence: Callable[[], None],
        before_write: BeforeWrite,
        pause: Pause,
    ) -> None:
        """Piece by piece, as an object store does, or aside and by one rename, as a directory does.

        Others may get their turn between any two writes, and between the last look at the claims and the manifest.
        """
        staged: dict[str, Any] = {}
        if self.by_lineage:
            before_write("sweep")
            self._sweep(lambda left: left.lineage == manifest.lineage)
            slot = self._unused(slot)
            self.slots_by_name[slot.name], self.pieces[slot.name] = slot, {}
        else:
            self.staged.append((manifest.lineage, staged))
        for name in PIECES:
            before_write(name)
            # What was swept meanwhile comes back in an object store, and is of no use.
            (self.pieces[slot.name] if self.by_lineage else staged)[name] = getattr(saved, name)
        await pause()
        fence()
        before_write("fenced")
        await pause()
        if self.by_lineage:
            before_write("manifest")
            if self.pieces[slot.name].setdefault("manifest", encode_manifest(manifest)) == CLEARED:
                raise FileExistsError("a newer trainer cleared what was not finished")
        else:
            self._rename(slot, staged, manifest, before_write)
        before_write("after manifest")
        await pause()

    def _unused(self, slot: Slot) -> Slot:
        """The slot, or the next one of its step at which no upload was begun."""
        attempts = (slot.name, *(f"{slot.name}-{attempt}" for attempt in range(2, len(self.pieces) + 3)))
        return replace(slot, name=next(name for name in attempts if name not in self.pieces))

    def _rename(
        self, slot: Slot, staged: dict[str, Any], manifest: CheckpointManifest, before_write: BeforeWrite
    ) -> None:
        """Nobody comes between the two renames but a crash."""
        self._check_staged(staged)
        if slot.name in self.pieces:
            before_write("put aside")
            self.replaced[manifest.lineage, slot.name] = self.pieces.pop(slot.name)
        try:
            before_write("manifest")
        except OSError:
            if (old := self.replaced.pop((manifest.lineage, slot.name), None)) is not None:
                self.pieces[slot.name] = old
            raise
        self.staged = [other for other in self.staged if other[1] is not staged]
        self.slots_by_name[slot.name] = slot
        self.pieces[slot.name] = staged | {"manifest": encode_manifest(manifest)}
        self.replaced.pop((manifest.lineage, slot.name), None)

    def _check_staged(self, staged: dict[str, Any]) -> None:
        if not any(other is staged for _, other in self.staged):
            raise FileNotFoundError("no such directory: a newer trainer removed what was not finished")


@dataclass(eq=False)
class SimDirectory:
    """A run's directory. ``adopts``: its trainers are told to take the run over.

    ``orphans_through``: lineages up to this one were the run's in another directory, whose life ended there.
    """

    place: MemoryPlace
    identity: MemoryIdentity = field(default_factory=MemoryIdentity)
    adopts: bool = False
    orphans_through: int = 0


@dataclass(frozen=True)
class SimState:
    """A verified checkpoint's pieces."""

    manifest: CheckpointManifest
    saved: SavedPieces

    @property
    def reader(self) -> Mapping[str, Any]:
        """The reader's snapshot."""
        found: Mapping[str, Any] = json.loads(self.saved.reader)
        return found

    @property
    def report(self) -> bytes:
        """The step report, encoded."""
        return self.saved.report


@dataclass(frozen=True)
class SimRestored:
    """A verified checkpoint."""

    state: SimState
    undoes: int = 0


@dataclass
class SimCheckpoints:
    """One process's view of the place; the newest ``keep`` of the chain stay."""

    place: MemoryPlace
    keep: int
    before_write: BeforeWrite
    pause: Pause

    def held(self, claimed: int = 0) -> CheckpointsState:
        """What is claimed and kept."""
        return read_checkpoints_state(self.place, claimed)

    def claim_lineage(self, *, at_least: int = 1, now: float) -> Lineage:
        """Take the run over."""
        newest = max((manifest.lineage for manifest in read_manifests(self.place)), default=0)
        try:
            self.before_write("claim")
            lineage = claim_lineage(self.place, at_least=max(at_least, newest + 1), now=now)
            self.before_write("after claim")
            self.place.clear_leftovers(lineage.number)
        except OSError as error:
            raise CheckpointError(f"expected to claim a lineage, got: {error}") from error
        return lineage

    def newest(self) -> SimRestored | None:
        """By lineage and then step, as far as no rollback undid it; pieces are whole whenever there is a manifest.

        Raises:
            CheckpointError: no manifest is sound, or pieces are missing, which no crash may come to.
        """
        rollback = read_rollback(self.place)
        entries = resumable(read_entries(self.place), rollback)
        for entry in entries:
            if entry.manifest is not None:
                found = self.place.pieces[entry.slot.name]
                if not found.keys() >= set(PIECES):
                    raise CheckpointError(f"expected a checkpoint with its manifest, got {sorted(found)}")
                pieces = SavedPieces(*(found[name] for name in PIECES))
                undoes = rollback.lineage if rollback is not None and entry.order[0] <= rollback.lineage else 0
                return SimRestored(SimState(entry.manifest, pieces), undoes)
        if entries:
            raise CheckpointError(f"expected a checkpoint that verifies, got: {entries[0].problem}")
        return None

    async def write(self, saved: SavedPieces, manifest: CheckpointManifest, lineage: Any) -> str:
        """Write a checkpoint and prune.

        Raises:
            CheckpointError: a write failed; earlier checkpoints are as they were.
            Superseded: a newer lineage exists.
        """
        slot = self.place.slot(manifest.lineage, manifest.step)
        pinned = pinned_versions(read_pins(self.place).values())
        self._set_pinned_aside(slot, lineage, pinned)
        try:
            await self.place.put(slot, saved, manifest, lineage.check, self.before_write, self.pause)
        except OSError as error:
            with suppress(CheckpointError):
                lineage.check()
            raise CheckpointError(f"expected to write {slot.name}, got: {error}") from error
        with suppress(OSError):
            for old in prunable_slots(read_entries(self.place), manifest, self.keep, pinned):
                self.before_write("prune")
                self.place.remove(old)
        return slot.name

    def _set_pinned_aside(self, slot: Slot, lineage: Any, pinned: Collection[PolicyVersion]) -> None:
        """On a disk a lineage takes over the places of older ones; what is pinned there moves out of the way."""
        data = self.place.manifest(slot)
        if data is None or self.place.aside(slot, lineage.number) == slot:
            return
        with suppress(CheckpointError):
            there = decode_manifest(data)
            if there.lineage < lineage.number and there.policy_version in pinned:
                lineage.check()
                self.before_write("set aside")
                self.place.set_aside(slot, there.lineage)
