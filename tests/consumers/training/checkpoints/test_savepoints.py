import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamrl.consumers.training.checkpoints.catalogue import newest_model, next_start, read_rollback
from streamrl.consumers.training.checkpoints.savepoints import Savepoints, pin, problems_of, restore, unpin
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.schemas.errors import CheckpointError, Superseded, UserError
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import Storage, identity, newest, versions, write


def written(storage: Storage, *steps: int, keep: int = 9) -> None:
    lineage = CheckpointStore(storage.open(), keep).claim_lineage(now=0.0)
    for step in steps:
        write(storage.open(), step, lineage, keep=keep)


def savepoints(storage: Storage) -> Savepoints:
    return Savepoints.read(storage.open())


def restored(storage: Storage, text: str) -> dict[str, PolicyVersion]:
    found = savepoints(storage)
    done = restore(found, found.find(text), 7.0)
    return {} if done is None else dict(done.undone)


def test_pinned_checkpoints_are_kept_when_others_are_pruned(storage: Storage) -> None:
    written(storage, 2)
    found = savepoints(storage)
    assert pin(found, found.find("2"), "before-lr", 1.0) == "before-lr"
    lineage = CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)
    for step in (4, 6, 8):
        write(storage.open(), step, lineage, PolicyVersion(1, 2), keep=2)
    assert versions(storage.open()) == [(2, 8), (2, 6), (1, 2)]
    assert unpin(savepoints(storage), "before-lr") == ["before-lr"]
    write(storage.open(), 10, lineage, PolicyVersion(1, 2), keep=2)
    assert versions(storage.open()) == [(2, 10), (2, 8)]


def test_a_pinned_checkpoint_is_not_written_over_by_another_lineage_of_its_step(storage: Storage) -> None:
    written(storage, 2, 4)
    found = savepoints(storage)
    pin(found, found.find("4"), None, 1.0)
    lineage = CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)
    write(storage.open(), 4, lineage, PolicyVersion(1, 2), keep=2)
    assert versions(storage.open()) == [(2, 4), (1, 4), (1, 2)]
    kept = savepoints(storage).find("1-4")
    assert kept.manifest is not None
    assert identity(CheckpointStore(storage.open(), 2).load(kept.manifest)) == (1, 4)


def test_two_operators_may_write_the_same_note_at_once(storage: Storage) -> None:
    contents = [b"%d" % number * 1000 for number in range(40)]
    opened = storage.open()
    with ThreadPoolExecutor(4) as operators:
        list(operators.map(lambda content: opened.put_note("rollback", content), contents))
    assert opened.note("rollback") in contents


def test_a_restore_deletes_nothing(storage: Storage) -> None:
    written(storage, 2, 4, 6)
    assert restored(storage, "2") == {"undone-1-6": (1, 6), "undone-1-4": (1, 4)}
    assert newest(storage.open()) == (1, 2)
    lineage = CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)
    assert lineage.number == 3
    for step in (4, 6, 8):
        write(storage.open(), step, lineage, PolicyVersion(1, 2), keep=2)
    # The checkpoint that the run continued from is pruned as usual. The undone checkpoints are kept.
    assert versions(storage.open()) == [(3, 8), (3, 6), (1, 6), (1, 4)]
    assert newest(storage.open()) == (3, 8)
    # A second restore returns to a checkpoint that the first one undid.
    assert restored(storage, "1-6") == {"undone-3-8": (3, 8), "undone-3-6": (3, 6)}
    assert newest(storage.open()) == (1, 6)


def test_the_restored_checkpoint_is_what_a_run_resumes_from(storage: Storage, tmp_path: Path) -> None:
    written(storage, 2, 4)
    restored(storage, "2")
    held = CheckpointStore(storage.open(), 2).held()
    assert held.newest is not None
    assert (held.newest.policy_version, held.lineage) == ((1, 2), 2)
    model = newest_model(str(storage.open()), tmp_path / "c")
    assert model is not None
    assert "step_2" in str(model)
    # This checkpoint was undone and is now chosen. In a directory, it was moved aside.
    restored(storage, "1-4")
    model = newest_model(str(storage.open()), tmp_path / "c")
    assert model is not None
    assert (model / "config.json").exists()
    assert "step_4" in str(model)


def test_the_checkpoint_says_that_an_operator_chose_it(storage: Storage) -> None:
    written(storage, 2, 4)
    chosen = CheckpointStore(storage.open(), 2).newest()
    assert chosen is not None
    assert chosen.undoes == 0
    restored(storage, "2")
    chosen = CheckpointStore(storage.open(), 2).newest()
    assert chosen is not None
    assert chosen.undoes == 2


def test_a_rollback_holds_until_a_newer_lineage_has_a_checkpoint(storage: Storage) -> None:
    written(storage, 2, 4, 6)
    restored(storage, "4")
    storage.put(1, 4, "model.safetensors", b"damaged")
    assert newest(storage.open()) == (1, 2), "an undone checkpoint is never used, even if the chosen one is damaged"
    lineage = CheckpointStore(storage.open(), 9).claim_lineage(now=0.0)
    write(storage.open(), 6, lineage, PolicyVersion(1, 2), keep=9)
    assert newest(storage.open()) == (3, 6)
    start = next_start(storage.open())
    assert start is not None
    assert start.policy_version == (3, 6)


def test_a_chosen_checkpoint_that_is_gone_is_no_reason_to_take_an_undone_one(local_storage: Storage) -> None:
    written(local_storage, 2, 4)
    restored(local_storage, "2")
    local_storage.put(1, 2, "trainer_state/manifest.json", None)
    with pytest.raises(CheckpointError, match="expected checkpoint 1-2, to which this run was rolled back"):
        newest(local_storage.open())


def test_a_restore_fences_older_trainers(storage: Storage) -> None:
    lineage = CheckpointStore(storage.open(), 9).claim_lineage(now=0.0)
    for step in (2, 4):
        write(storage.open(), step, lineage, keep=9)
    restored(storage, "2")
    with pytest.raises(Superseded):
        write(storage.open(), 6, lineage, keep=9)
    assert newest(storage.open()) == (1, 2)


def test_a_restore_is_decided_by_one_write(local_storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    written(local_storage, 2, 4)
    found = savepoints(local_storage)

    def full(name: str, content: bytes) -> None:
        if name == "rollback":
            raise OSError(28, "No space left on device")
        type(found.storage).put_note(found.storage, name, content)

    object.__setattr__(found.storage, "put_note", full)
    with pytest.raises(CheckpointError, match=r"expected to write rollback.json .*No space left"):
        restore(found, found.find("2"), 7.0)
    assert read_rollback(local_storage.open()) is None
    assert newest(local_storage.open()) == (1, 4)


def test_a_trainer_that_started_meanwhile_is_reported(local_storage: Storage) -> None:
    written(local_storage, 2, 4)
    found = savepoints(local_storage)
    put = found.storage.put_note

    def and_a_trainer_starts(name: str, content: bytes) -> None:
        put(name, content)
        if name == "rollback":
            CheckpointStore(local_storage.open(), 2).claim_lineage(now=0.0)

    object.__setattr__(found.storage, "put_note", and_a_trainer_starts)
    with pytest.raises(UserError, match="is restored, but one did; stop the run, and restore again"):
        restore(found, found.find("2"), 7.0)


def test_restoring_the_newest_checkpoint_changes_nothing(storage: Storage) -> None:
    written(storage, 2, 4)
    assert restored(storage, "4") == {}
    assert storage.open().claims() == [1]


def test_verification_names_the_file_that_is_wrong(storage: Storage) -> None:
    written(storage, 2, 4)
    found = savepoints(storage)
    assert problems_of(found.storage, found.find("2")) == []
    original = storage.read(1, 2, "model.safetensors")
    storage.put(1, 2, "model.safetensors", original[:-1] + b"x")
    storage.put(1, 2, "config.json", b"{} ")
    storage.put(1, 2, "trainer_state/rng.safetensors", None)
    problems = problems_of(found.storage, found.find("2"))
    assert [problem.rpartition("/")[2].split()[0] for problem in problems][1] == "model.safetensors"
    assert problems[0].startswith("expected 2 bytes in ")
    assert "config.json, got 3" in problems[0]
    assert "with sha256" in problems[1]
    assert "rng.safetensors, found none" in problems[2]
    storage.put(1, 4, "trainer_state/manifest.json", b"{}")
    (damaged,) = [entry for entry in savepoints(storage).entries if entry.manifest is None]
    assert "expected a sealed manifest" in problems_of(found.storage, damaged)[0]


def test_a_damaged_checkpoint_is_neither_pinned_nor_restored(storage: Storage) -> None:
    written(storage, 2, 4)
    storage.put(1, 2, "config.json", b"{} ")
    found = savepoints(storage)
    with pytest.raises(UserError, match="expected checkpoint 1-2 to verify, got 1 bad files; nothing is pinned"):
        pin(found, found.find("2"), "x", 1.0)
    assert savepoints(storage).pins == {}
    with pytest.raises(UserError, match="expected checkpoint 1-2 to verify"):
        restored(storage, "2")
    assert storage.open().claims() == [1]


@pytest.mark.parametrize("name", ["5", "1-4", "../x", "A", ""])
def test_a_name_is_distinguished_from_steps_and_versions(local_storage: Storage, name: str) -> None:
    written(local_storage, 2)
    found = savepoints(local_storage)
    with pytest.raises(UserError, match="expected a name of 1 to 64"):
        pin(found, found.find("2"), name, 1.0)


def test_a_name_is_of_one_checkpoint(local_storage: Storage) -> None:
    written(local_storage, 2, 4)
    found = savepoints(local_storage)
    pin(found, found.find("2"), "good", 1.0)
    with pytest.raises(UserError, match="got 'good', which pins 1-2; unpin it first"):
        pin(savepoints(local_storage), found.find("4"), "good", 1.0)


def test_a_step_of_two_lineages_is_named_by_its_version(memory_storage: Storage) -> None:
    written(memory_storage, 2, 4)
    restored(memory_storage, "2")
    lineage = CheckpointStore(memory_storage.open(), 9).claim_lineage(now=0.0)
    write(memory_storage.open(), 4, lineage, PolicyVersion(1, 2), keep=9)
    with pytest.raises(UserError, match=r"since several checkpoints have this step, got '4'; there are: 3-4, 1-4"):
        savepoints(memory_storage).find("4")
    assert savepoints(memory_storage).find("undone-1-4").order == (1, 4)
    with pytest.raises(UserError, match=r"got 'nothing'; there are: 3-4, 1-4, 1-2"):
        savepoints(memory_storage).find("nothing")


def test_a_mark_that_is_none_is_named(local_storage: Storage) -> None:
    written(local_storage, 2)
    (Path(local_storage.url) / "rollback.json").write_text(json.dumps({"version": 3}))
    with pytest.raises(CheckpointError, match=r"expected a rollback in rollback.json of .*; delete the file"):
        newest(local_storage.open())


def test_a_restore_in_an_object_store_moves_nothing(memory_storage: Storage) -> None:
    written(memory_storage, 2, 4)
    before = memory_storage.names()
    restored(memory_storage, "2")
    assert memory_storage.names() - before == {"rollback.json", "pins/undone-1-4.json", "lineages/2.json"}
    assert before <= memory_storage.names()
