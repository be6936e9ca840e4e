from pathlib import Path
from typing import cast

import pytest
import torch
from structlog.testing import capture_logs

from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage
from streamrl.consumers.training.checkpoints.store import CheckpointStore, load_checkpoint
from streamrl.schemas.errors import CheckpointError, Superseded
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import (
    FILES,
    Storage,
    identity,
    newest,
    state_of,
    versions,
    write,
    write_model,
)


class NoClaims:
    """A storage that shows no claims. A trainer passes its fence, as if suspended right after the check."""

    def claims(self) -> list[int]:
        return []


def store_at(storage: Storage, keep: int = 3) -> CheckpointStore:
    return CheckpointStore(storage.open(), keep)


def begin(storage: Storage) -> Lineage:
    return store_at(storage).claim_lineage(now=0.0)


def test_a_checkpoint_is_read_back_as_written(storage: Storage) -> None:
    address = write(storage.open(), 7, begin(storage))
    assert address.endswith("step_7")
    restored = store_at(storage).newest()
    assert restored is not None
    found, expected = restored.state, state_of(1, 7)
    assert found.manifest.model_copy(update={"files": ()}) == expected.manifest
    assert {file.path for file in found.manifest.files} | {"trainer_state/manifest.json"} == set(FILES)
    assert torch.equal(found.optimizer["w.exp_avg"], expected.optimizer["w.exp_avg"])
    assert torch.equal(found.rng["cpu"], expected.rng["cpu"])
    assert (found.reader, found.report) == (expected.reader, expected.report)
    assert {path.relative_to(restored.directory).as_posix() for path in restored.directory.rglob("*.*")} == set(FILES)
    assert identity(store_at(storage).load(found.manifest)) == (1, 7)


def test_without_any_checkpoint_there_is_nothing_to_restore(storage: Storage) -> None:
    assert store_at(storage).newest() is None
    assert store_at(storage).manifests() == []


def test_the_newest_lineage_is_restored_though_an_orphan_took_more_steps(storage: Storage) -> None:
    orphan = begin(storage)
    write(storage.open(), 4, orphan)
    second = begin(storage)
    write(storage.open(), 5, second, PolicyVersion(1, 4))
    late = Lineage(1, cast(CheckpointStorage, NoClaims()))
    write(storage.open(), 9, late)
    assert newest(storage.open()) == (2, 5)


def test_the_newest_checkpoints_are_kept(storage: Storage) -> None:
    lineage = begin(storage)
    for step in (8, 9, 10):
        write(storage.open(), step, lineage, keep=2)
    assert versions(storage.open()) == [(1, 10), (1, 9)]
    assert not [name for name in storage.names() if "step_8" in name]


def test_checkpoints_of_an_abandoned_future_go_with_the_next_write(storage: Storage) -> None:
    first = begin(storage)
    for step in (3, 5, 6):
        write(storage.open(), step, first)
    write(storage.open(), 5, begin(storage), PolicyVersion(1, 3))
    assert versions(storage.open()) == [(2, 5), (1, 3)]
    assert not [name for name in storage.names() if "step_6" in name or ".tmp" in name]


def test_a_step_that_is_written_again_replaces_the_one_before(storage: Storage) -> None:
    lineage = begin(storage)
    write(storage.open(), 4, lineage)
    storage.put(1, 4, "model.safetensors", b"damaged")
    write(storage.open(), 4, lineage)
    assert newest(storage.open()) == (1, 4)
    assert not [name for name in storage.names() if ".tmp" in name]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["changed", "missing", "cut", "longer", "empty"])
def test_a_checkpoint_that_does_not_verify_is_never_loaded(storage: Storage, name: str, damage: str) -> None:
    lineage = begin(storage)
    write(storage.open(), 1, lineage)
    write(storage.open(), 2, lineage)
    content = storage.read(1, 2, name)
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    damaged = {"changed": flipped, "missing": None, "cut": content[:-1], "longer": content + b"\0", "empty": b""}
    storage.put(1, 2, name, damaged[damage])
    with capture_logs() as logs:
        assert newest(storage.open()) == (1, 1)
    warned = [entry["problem"] for entry in logs if entry["log_level"] == "warning"]
    if damage == "missing" and name.endswith("manifest.json") and "://" in str(storage.url):
        assert warned == [], "an upload without a manifest is unfinished, not damaged"
    else:
        assert len(warned) == 1
        assert "step_2" in warned[0]


def test_a_start_from_zero_is_refused_when_no_checkpoint_verifies(storage: Storage) -> None:
    write(storage.open(), 1, begin(storage))
    storage.put(1, 1, "model.safetensors", b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match=r"none of 1: .*model.safetensors.* move them away"):
        store_at(storage).newest()


def test_a_superseded_writer_publishes_nothing(storage: Storage) -> None:
    lineage = begin(storage)
    write(storage.open(), 1, lineage)

    def overtaken(directory: Path) -> None:
        write_model(directory)
        begin(storage)

    with pytest.raises(Superseded, match="found 2"):
        store_at(storage).write(state_of(1, 2), overtaken, lineage)
    assert versions(storage.open()) == [(1, 1)]
    begin(storage)
    assert not [name for name in storage.names() if "step_2" in name]


def test_the_next_lineage_is_newer_than_every_checkpoint_even_if_the_claims_are_lost(local_storage: Storage) -> None:
    write(local_storage.open(), 1, begin(local_storage))
    (local_storage.root / "checkpoints" / "lineages" / "1.json").unlink()
    assert begin(local_storage).number == 2


def test_a_pickle_under_the_name_of_a_tensor_file_is_refused_though_its_checksum_fits(storage: Storage) -> None:
    lineage = begin(storage)
    write(storage.open(), 1, lineage)

    def pickled(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05hello\x94.")

    store_at(storage).write(state_of(1, 2), pickled, lineage)
    assert newest(storage.open()) == (1, 1)


def test_a_checkpoint_without_a_model_is_refused(local_storage: Storage) -> None:
    store_at(local_storage).write(state_of(1, 2), lambda directory: None, begin(local_storage))
    with pytest.raises(CheckpointError, match="lists no model"):
        load_checkpoint(local_storage.root / "checkpoints" / "step_2")
