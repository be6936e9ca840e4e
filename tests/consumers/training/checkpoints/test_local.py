import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from streamrl.consumers.training.checkpoints import store as store_module
from streamrl.consumers.training.checkpoints.catalogue import Lineage, claim_lineage, prunable_slots
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, Slot
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.schemas.errors import Superseded
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import Storage, newest, state_of, versions, write, write_model


@dataclass
class Meanwhile:
    """A storage that runs ``act`` when the claims are read for the ``at``-th time, and shows the claims only later."""

    act: Callable[[], None]
    at: int
    truth: CheckpointStorage
    looks: int = 0

    def claims(self) -> list[int]:
        self.looks += 1
        if self.looks == self.at:
            self.act()
        return [] if self.looks <= self.at else self.truth.claims()


def claimed(storage: Storage) -> Lineage:
    return CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)


@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("occupied", [False, True])
def test_a_newer_checkpoint_is_never_overwritten(local_storage: Storage, look: int, occupied: bool) -> None:
    write(local_storage.open(), 4, claimed(local_storage))
    zombie = claimed(local_storage)
    if occupied:
        late = Meanwhile(lambda: None, 99, local_storage.open())
        write(local_storage.open(), 6, Lineage(1, cast(CheckpointStorage, late)))

    def take_over() -> None:
        write(local_storage.open(), 6, claimed(local_storage), PolicyVersion(1, 4))

    stopped = Meanwhile(take_over, look, local_storage.open())
    with pytest.raises(Superseded):
        write(local_storage.open(), 6, Lineage(zombie.number, cast(CheckpointStorage, stopped)), PolicyVersion(1, 4))
    assert newest(local_storage.open()) == (3, 6)


def test_a_checkpoint_appears_whole(local_storage: Storage) -> None:
    lineage = claimed(local_storage)
    seen: list[list[tuple[int, int]]] = []

    def look(directory: Path) -> None:
        write_model(directory)
        seen.append(versions(local_storage.open()))

    CheckpointStore(local_storage.open(), 2).write(state_of(1, 2), look, lineage)
    assert seen == [[]]
    assert versions(local_storage.open()) == [(1, 2)]


def test_a_checkpoint_whose_replacement_never_came_is_put_back(local_storage: Storage) -> None:
    write(local_storage.open(), 4, claimed(local_storage))
    root = local_storage.root / "checkpoints"
    (root / "step_4").rename(root / ".tmp-old-1-step_4")
    (root / ".tmp-1-step_4").mkdir()
    (root / ".tmp-gone-step_2").mkdir()
    claimed(local_storage)
    assert newest(local_storage.open()) == (1, 4)
    assert sorted(path.name for path in root.iterdir()) == ["lineages", "step_4"]


def test_a_late_prune_removes_no_checkpoint_of_a_newer_trainer(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old trainer has listed the slots to delete. Then a newer trainer writes to one of them."""
    first = claimed(local_storage)
    for step in (4, 6):
        write(local_storage.open(), step, first)
    zombie = claimed(local_storage)

    def look_and_stand_still(*arguments: Any) -> list[Slot]:
        found = prunable_slots(*arguments)
        assert [slot.name for slot in found] == ["step_6"]
        monkeypatch.undo()
        write(local_storage.open(), 6, claimed(local_storage), PolicyVersion(1, 4))
        return found

    monkeypatch.setattr(store_module, "prunable_slots", look_and_stand_still)
    with pytest.raises(Superseded):
        write(local_storage.open(), 5, zombie, PolicyVersion(1, 4))
    assert newest(local_storage.open()) == (3, 6)


def test_files_of_a_newer_lineage_are_never_cleared_by_a_trainer_that_stood_still(local_storage: Storage) -> None:
    write(local_storage.open(), 4, claimed(local_storage))
    slow = claim_lineage(local_storage.open(), at_least=1, now=0.0)
    claimed(local_storage)
    root = local_storage.root / "checkpoints"
    (root / "step_4").rename(root / ".tmp-old-3-step_4")
    for name in (".tmp-1-step_6", ".tmp-3-step_4"):
        (root / name).mkdir()
    local_storage.open().clear_leftovers(slow.number)
    assert sorted(path.name for path in root.glob(".tmp-*")) == [".tmp-3-step_4", ".tmp-old-3-step_4"]


def test_other_files_next_to_checkpoints_are_ignored(local_storage: Storage) -> None:
    root = local_storage.root / "checkpoints"
    for name in ("step_x", "step_4.bak", "notes", "step_", "step_٣"):
        (root / name).mkdir(parents=True)
    (root / "lineages").mkdir()
    (root / "lineages" / "²x.json").touch()
    assert versions(local_storage.open()) == []
    assert claimed(local_storage).number == 1


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = claimed(local_storage)
    synced: set[int] = set()
    unsynced: list[list[str]] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_rename(path: Path, target: Path) -> Path:
        parts = [path, *path.rglob("*")]
        unsynced.append([part.name for part in parts if part.stat().st_ino not in synced])
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    write(local_storage.open(), 4, lineage)
    assert unsynced == [[]]


def test_the_old_checkpoint_goes_when_the_name_of_the_new_one_is_on_the_disk(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(local_storage.open(), 4, claimed(local_storage))
    lineage = claimed(local_storage)
    done: list[str] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def note_rename(path: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return rename(path, target)

    def note_removal(path: Path, *, ignore_errors: bool) -> None:
        if path.exists():
            done.append(f"remove {path.name}")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(shutil, "rmtree", note_removal)
    write(local_storage.open(), 4, lineage, PolicyVersion(1, 2))
    named = done.index("rename to step_4")
    # A rename is durable once its directory is synced. Before that, a power failure undoes it.
    assert done[named - 1] == "rename to .tmp-old-2-step_4"
    assert done[named + 1 : named + 3] == ["sync checkpoints", "remove .tmp-old-2-step_4"]
