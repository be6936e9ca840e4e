"""What an operator can do with checkpoints: find, verify, pin, restore. Loads no tensor library.

Invariants, each with a test of its name:
- a_restore_deletes_nothing: the checkpoints that it undoes are pinned, and in a directory they are renamed, so that new
  checkpoints do not replace them;
- a_restore_is_decided_by_one_write: until the rollback is written, a start continues from the newest checkpoint;
  afterwards from the chosen one;
- a_restore_fences_older_trainers: it claims a lineage, so that no trainer that is still alive can undo the choice.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.consumers.training.checkpoints.catalogue import (
    PINS,
    ROLLBACK,
    CheckpointEntry,
    Pin,
    Rollback,
    claim_lineage,
    pinned_versions,
    read_entries,
    read_pins,
    read_rollback,
    resumable,
)
from streamrl.consumers.training.checkpoints.manifest import CheckpointFile
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, Slot
from streamrl.schemas.errors import CheckpointError, Superseded, UserError
from streamrl.schemas.identifiers import PolicyVersion, is_plain_name

UNDONE = "undone-"
"""Prefix of the pins that a restore makes."""


@dataclass(frozen=True)
class Savepoints:
    """Everything that a storage held at one moment; ``entries``: newest first."""

    storage: CheckpointStorage
    entries: Sequence[CheckpointEntry]
    pins: Mapping[str, Pin]
    rollback: Rollback | None

    @classmethod
    def read(cls, storage: CheckpointStorage) -> "Savepoints":
        """The storage's present state.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        return cls(storage, read_entries(storage), read_pins(storage), read_rollback(storage))

    @property
    def next_start(self) -> CheckpointEntry | None:
        """The checkpoint that a start continues from, if it verifies; None: the initial model, or a refused start."""
        return next((entry for entry in self._resumable() if entry.manifest is not None), None)

    @property
    def staying(self) -> frozenset[Slot]:
        """The slots that no restore has undone."""
        return frozenset(entry.slot for entry in self._resumable())

    def _resumable(self) -> Sequence[CheckpointEntry]:
        try:
            return resumable(self.entries, self.rollback)
        except CheckpointError:
            return ()

    def names(self, entry: CheckpointEntry) -> list[str]:
        """Names of a checkpoint's pins."""
        return [name for name, pin in self.pins.items() if pin.version == entry.order]

    def find(self, text: str) -> CheckpointEntry:
        """The checkpoint named by a pin, a version such as 1-40, or a step that only one checkpoint has.

        Raises:
            UserError: there is none, or more than one.
        """
        sound = [entry for entry in self.entries if entry.manifest is not None]
        if text in self.pins:
            found = [entry for entry in sound if entry.order == self.pins[text].version]
        elif text.isdecimal():
            found = [entry for entry in sound if entry.slot.step == int(text)]
        else:
            found = [entry for entry in sound if str(PolicyVersion(*entry.order)) == text]
        if len(found) == 1:
            return found[0]
        there = ", ".join(str(PolicyVersion(*entry.order)) for entry in found or sound) or "none"
        wanted = (
            "a version, since several checkpoints have this step" if found else "a checkpoint's step, version or pin"
        )
        raise UserError(f"expected {wanted}, got {text!r}; there are: {there}")


def problems_of(storage: CheckpointStorage, entry: CheckpointEntry) -> list[str]:
    """The problems of a checkpoint, file by file; reads every byte. Empty: it verifies."""
    if entry.manifest is None:
        return [entry.problem]
    return [problem for file in entry.manifest.files if (problem := _problem(storage, entry.slot, file)) is not None]


def _problem(storage: CheckpointStorage, slot: Slot, file: CheckpointFile) -> str | None:
    where = f"{storage.address(slot)}/{file.path}"
    digest, size = hashlib.sha256(), 0
    try:
        for piece in storage.contents(slot, file.path):
            digest.update(piece)
            size += len(piece)
    except FileNotFoundError:
        return f"expected {where}, found none"
    except OSError as error:
        return f"expected to read {where}, got: {error}"
    if size != file.size:
        return f"expected {file.size} bytes in {where}, got {size}"
    if digest.hexdigest() != file.sha256:
        return f"expected {where} with sha256 {file.sha256}, got {digest.hexdigest()}"
    return None


def pin(found: Savepoints, entry: CheckpointEntry, name: str | None, now: float) -> str:
    """Protect a checkpoint from pruning; returns the pin's name, the checkpoint's version if ``name`` is None.

    Raises:
        UserError: the name is taken or not a valid one, or the checkpoint does not verify.
        CheckpointError: the storage cannot be written to.
    """
    version = str(PolicyVersion(*entry.order))
    name = version if name is None else name
    if not is_plain_name(name) or (name != version and name.replace("-", "").isdecimal()):
        raise UserError(f"expected a name of 1 to 64 of a-z, 0-9, '.', '_' and '-' with a letter, got {name!r}")
    if (taken := found.pins.get(name)) is not None and taken.version != entry.order:
        raise UserError(
            f"expected a new name, got {name!r}, which pins {PolicyVersion(*taken.version)}; unpin it first"
        )
    _put(found.storage, f"{PINS}/{name}", Pin(version=PolicyVersion(*entry.order), pinned_at=now))
    # Verified only now: a trainer that prunes in the meantime either sees the pin, or its deletion is found here.
    if problems := problems_of(found.storage, entry):
        if taken is None:
            found.storage.remove_note(f"{PINS}/{name}")
        raise UserError(
            f"expected checkpoint {version} to verify, got {len(problems)} bad files; nothing is pinned: {problems[0]}"
        )
    return name


def unpin(found: Savepoints, text: str) -> list[str]:
    """Remove one pin by its name, or all pins of a checkpoint; returns the names of the removed pins.

    Raises:
        UserError: there is no such pin.
        CheckpointError: the storage cannot be written to.
    """
    names = [text] if text in found.pins else found.names(found.find(text))
    if not names:
        raise UserError(f"expected a pinned checkpoint, got {text!r}, which has no pin")
    try:
        for name in names:
            found.storage.remove_note(f"{PINS}/{name}")
    except OSError as error:
        raise CheckpointError(f"expected to unpin {names} in {found.storage}, got: {error}") from error
    return names


@dataclass(frozen=True)
class Restored:
    """A restore's result; ``undone``: versions of the checkpoints that it undid, by the pins that keep them."""

    rollback: Rollback
    undone: Mapping[str, PolicyVersion]


def restore(found: Savepoints, entry: CheckpointEntry, now: float) -> Restored | None:
    """Make the next start continue from a checkpoint; None: it would do so anyway, and nothing was changed.

    Raises:
        UserError: the checkpoint does not verify, or a trainer was started in the meantime.
        CheckpointError: the storage cannot be read or written to.
    """
    storage, version = found.storage, PolicyVersion(*entry.order)
    if (ahead := found.next_start) is not None and ahead.order == entry.order:
        return None
    if problems := problems_of(storage, entry):
        raise UserError(f"expected checkpoint {version} to verify, got {len(problems)} bad files: {problems[0]}")
    newest = max((each.order[0] for each in found.entries), default=0)
    lineage = claim_lineage(storage, at_least=newest + 1, now=now)
    rollback = Rollback(version=version, lineage=lineage.number, restored_at=now)
    # Read again now: a trainer that was alive until the claim may have written another checkpoint.
    found = Savepoints.read(storage)
    staying = {each.slot for each in resumable(found.entries, rollback)}
    pinned = pinned_versions(found.pins.values())
    undone: dict[str, PolicyVersion] = {}
    leaving = [each for each in found.entries if each.manifest is not None and each.slot not in staying]
    for each in leaving:
        own = PolicyVersion(*each.order)
        if own not in pinned:
            _put(storage, f"{PINS}/{UNDONE}{own}", Pin(version=own, pinned_at=now))
        undone[next(iter(found.names(each)), f"{UNDONE}{own}")] = own
    _put(storage, ROLLBACK, rollback)
    try:
        for each in leaving:
            storage.set_aside(each.slot, each.order[0])
        lineage.check()
    except OSError as error:
        raise CheckpointError(
            f"expected to move the undone checkpoints aside in {storage}, got: {error}; run the restore again"
        ) from error
    except Superseded as error:
        raise UserError(
            f"expected no trainer to start while checkpoint {version} is restored, but one did; stop the run, and "
            "restore again"
        ) from error
    return Restored(rollback, undone)


def _put(storage: CheckpointStorage, name: str, mark: Pin | Rollback) -> None:
    try:
        storage.put_note(name, mark.model_dump_json().encode())
    except OSError as error:
        raise CheckpointError(f"expected to write {name}.json to {storage}, got: {error}") from error
