from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consumers.algorithms.settings import AlgorithmSettings
from consumers.training.persistence.checkpoint import (
    CheckpointManifest,
    CheckpointStore,
    TrainerState,
    config_hash,
    load_checkpoint,
)
from schemas.errors import CheckpointError
from schemas.identifiers import PolicyVersion


def state(step: int) -> TrainerState:
    manifest = CheckpointManifest(
        run="r",
        algorithm="grpo",
        lineage=1,
        step=step,
        policy_version=PolicyVersion(1, step),
        frontier={"0": {"low": step, "done": [step + 2]}},
        skip_counts={"stale": 2},
        config_hash="0",
        created_at=1.0,
    )
    return TrainerState(
        manifest, {"w.exp_avg": torch.full((3,), float(step))}, {"cpu": torch.get_rng_state()}, {"seen": ["p/0/0/0"]}
    )


def write(store: CheckpointStore, step: int) -> Path:
    return store.write(state(step), lambda directory: save_file({"w": torch.ones(2)}, directory / "model.safetensors"))


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_is_read_back_as_written(tmp_path: Path) -> None:
    directory = write(CheckpointStore(tmp_path, 2), 7)
    assert directory == tmp_path / "step_7"
    found = load_checkpoint(directory).state
    expected = state(7)
    assert found.manifest.model_copy(update={"files": ()}) == expected.manifest
    assert {file.path for file in found.manifest.files} == {
        "model.safetensors",
        "trainer_state/optimizer.safetensors",
        "trainer_state/rng.safetensors",
        "trainer_state/intake.json",
    }
    assert torch.equal(found.optimizer["w.exp_avg"], expected.optimizer["w.exp_avg"])
    assert torch.equal(found.rng["cpu"], expected.rng["cpu"])
    assert found.intake == expected.intake


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "trainer_state/optimizer.safetensors",
        "trainer_state/rng.safetensors",
        "trainer_state/intake.json",
        "trainer_state/manifest.json",
    ],
)
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_checkpoint_that_does_not_verify_is_never_loaded(tmp_path: Path, name: str, damage: str) -> None:
    store = CheckpointStore(tmp_path, 3)
    write(store, 1)
    newest = write(store, 2)
    if damage == "missing":
        (newest / name).unlink()
    else:
        corrupt(newest / name)
    restored = store.newest()
    assert restored is not None
    assert restored.state.manifest.step == 1


def test_without_any_checkpoint_there_is_nothing_to_restore(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", 2).newest() is None


def test_beginning_anew_by_accident_is_refused_when_no_checkpoint_verifies(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    corrupt(write(store, 1) / "model.safetensors")
    with pytest.raises(CheckpointError, match="move the directory away"):
        store.newest()


def test_the_newest_checkpoints_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (8, 9, 10):
        write(store, step)
    assert [path.name for path in store.directories()] == ["step_9", "step_10"]


def test_checkpoints_of_an_abandoned_future_go_with_the_next_write(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (3, 5):
        write(store, step)
    corrupt(tmp_path / "step_5" / "model.safetensors")
    write(store, 4)
    assert [path.name for path in store.directories()] == ["step_3", "step_4"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    corrupt(write(store, 4) / "model.safetensors")
    write(store, 4)
    restored = store.newest()
    assert restored is not None
    assert restored.state.manifest.step == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


def test_a_write_that_fails_leaves_the_checkpoints_as_they_were(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    write(store, 1)

    def fail(directory: Path) -> None:
        (directory / "half").write_text("…")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.write(state(2), fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_the_config_hash_changes_with_the_settings() -> None:
    assert config_hash(AlgorithmSettings()) == config_hash(AlgorithmSettings())
    assert config_hash(AlgorithmSettings()) != config_hash(AlgorithmSettings(beta=0.1))
