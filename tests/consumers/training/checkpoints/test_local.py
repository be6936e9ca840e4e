import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from consumers.training.checkpoints.catalogue import Lineage
from consumers.training.checkpoints.storage import CheckpointLocation
from consumers.training.checkpoints.store import CheckpointStore
from schemas.errors import Superseded
from schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.scene import Place, newest, state_of, versions, write, write_model


@dataclass
class Meanwhile:
    """A fence that lets its holder pass, though something happens at its ``at``-th look."""

    act: Callable[[], None]
    at: int
    truth: CheckpointLocation
    looks: int = 0

    def claims(self) -> list[int]:
        self.looks += 1
        if self.looks == self.at:
            self.act()
        return [] if self.looks <= self.at else self.truth.claims()


def claimed(place: Place) -> Lineage:
    return CheckpointStore(place.open(), 2).claim_lineage(now=0.0)


@pytest.mark.parametrize("look", [1, 2])
@pytest.mark.parametrize("occupied", [False, True])
def test_a_newer_checkpoint_is_never_written_over(local_place: Place, look: int, occupied: bool) -> None:
    write(local_place.open(), 4, claimed(local_place))
    zombie = claimed(local_place)
    if occupied:
        late = Meanwhile(lambda: None, 99, local_place.open())
        write(local_place.open(), 6, Lineage(1, cast(CheckpointLocation, late)))

    def take_over() -> None:
        write(local_place.open(), 6, claimed(local_place), PolicyVersion(1, 4))

    stopped = Meanwhile(take_over, look, local_place.open())
    with pytest.raises(Superseded):
        write(local_place.open(), 6, Lineage(zombie.number, cast(CheckpointLocation, stopped)), PolicyVersion(1, 4))
    assert newest(local_place.open()) == (3, 6)


def test_a_checkpoint_appears_whole(local_place: Place) -> None:
    lineage = claimed(local_place)
    seen: list[list[tuple[int, int]]] = []

    def look(directory: Path) -> None:
        write_model(directory)
        seen.append(versions(local_place.open()))

    CheckpointStore(local_place.open(), 2).write(state_of(1, 2), look, lineage)
    assert seen == [[]]
    assert versions(local_place.open()) == [(1, 2)]


def test_a_checkpoint_whose_replacement_never_came_is_put_back(local_place: Place) -> None:
    write(local_place.open(), 4, claimed(local_place))
    root = local_place.root / "checkpoints"
    (root / "step_4").rename(root / ".tmp-old-step_4")
    (root / ".tmp-2-step_4").mkdir()
    claimed(local_place)
    assert newest(local_place.open()) == (1, 4)
    assert sorted(path.name for path in root.iterdir()) == ["lineages", "step_4"]


def test_other_files_beside_the_checkpoints_are_none(local_place: Place) -> None:
    root = local_place.root / "checkpoints"
    for name in ("step_x", "step_4.bak", "notes", "step_", "step_٣"):
        (root / name).mkdir(parents=True)
    (root / "lineages").mkdir()
    (root / "lineages" / "²x.json").touch()
    assert versions(local_place.open()) == []
    assert claimed(local_place).number == 1


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(
    local_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = claimed(local_place)
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
    write(local_place.open(), 4, lineage)
    assert unsynced == [[]]
