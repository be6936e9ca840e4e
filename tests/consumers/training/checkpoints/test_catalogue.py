import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.training.checkpoints.catalogue import (
    CheckpointEntry,
    claim_lineage,
    prunable_slots,
    read_manifests,
)
from streamrl.consumers.training.checkpoints.storage import Slot
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import Storage, manifest_of, versions, write


def entry(lineage: int, step: int, parent: tuple[int, int] | None = None) -> CheckpointEntry:
    manifest = manifest_of(lineage, step, PolicyVersion(*parent) if parent else None)
    return CheckpointEntry(Slot(f"{lineage}-{step}", step, lineage), manifest)


def gone(entries: list[CheckpointEntry], written: CheckpointEntry, keep: int = 2) -> list[str]:
    assert written.manifest is not None
    listed = sorted([*entries, written], key=lambda item: item.order, reverse=True)
    return sorted(slot.name for slot in prunable_slots(listed, written.manifest, keep))


def test_the_newest_are_kept_by_number() -> None:
    assert gone([entry(1, 8), entry(1, 9)], entry(1, 10)) == ["1-8"]


def test_the_newest_lineage_comes_first(storage: Storage) -> None:
    first = claim_lineage(storage.open(), at_least=1, now=0.0)
    write(storage.open(), 4, first)
    second = claim_lineage(storage.open(), at_least=1, now=0.0)
    write(storage.open(), 5, second, PolicyVersion(1, 4))
    assert versions(storage.open()) == [(2, 5), (1, 4)]
    assert [found.step for found in read_manifests(storage.open())] == [5, 4]


def test_an_abandoned_later_checkpoint_is_removed_before_an_older_one_of_the_chain() -> None:
    history = [entry(1, 2), entry(1, 4)]
    assert gone(history, entry(2, 6, (1, 2))) == ["1-4"]


def test_a_lineage_that_no_one_went_on_from_goes() -> None:
    history = [entry(1, 2), entry(2, 4, (1, 2))]
    assert gone(history, entry(3, 6, (1, 2))) == ["2-4"]


def test_checkpoints_older_than_the_known_chain_are_kept() -> None:
    history = [entry(1, 2), entry(3, 9, (2, 6))]
    assert gone(history, entry(4, 10, (3, 9)), keep=3) == []


def test_a_trainer_whose_checkpoint_is_gone_removes_nothing() -> None:
    written = entry(1, 3).manifest
    assert written is not None
    assert prunable_slots([entry(2, 4, (1, 2)), entry(2, 3, (1, 2))], written, keep=2) == []


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), unique=True), st.integers(2, 4))
def test_checkpoints_of_a_newer_lineage_are_kept(found: list[tuple[int, int]], keep: int) -> None:
    written = entry(3, 5, (1, 4))
    names = gone([entry(*pair) for pair in found if pair != (3, 5)], written, keep)
    assert "3-5" not in names
    assert not [name for name in names if int(name.partition("-")[0]) > 3]


def test_a_damaged_one_goes_once_it_is_older_than_those_kept() -> None:
    damaged = [CheckpointEntry(Slot("step_2", 2), None, "…"), CheckpointEntry(Slot("step_5", 5), None, "…")]
    assert gone([*damaged, entry(1, 4)], entry(1, 6)) == ["step_2"]


def test_a_checkpoint_in_the_place_of_another_is_none(local_storage: Storage) -> None:
    write(local_storage.open(), 4, claim_lineage(local_storage.open(), at_least=1, now=0.0))
    root = local_storage.root / "checkpoints"
    (root / "step_4").rename(root / "step_9")
    assert read_manifests(str(root)) == []


@pytest.mark.processes
def test_reading_manifests_loads_no_tensor_library() -> None:
    code = (
        "import sys, consumers.training.checkpoints.catalogue, consumers.training.checkpoints.storage\n"
        "import streamrl.consumers.training.checkpoints.storage, streamrl.consumers.training.checkpoints.catalogue\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("url", ["ftp://host/x", "https://host/x", "s3://", "file:///tmp/x"])
def test_a_url_of_no_known_store_is_the_users_to_mend(url: str) -> None:
    with pytest.raises(SettingsError, match="s3://"):
        read_manifests(url)
