"""A checkpoint is refused if any byte of it has changed."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore, load_checkpoint
from streamrl.schemas.errors import CheckpointError
from tests.consumers.training.checkpoints.damaged_storage import FILES, Storage, write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    opened = open_storage(root, root)
    return Path(write(opened, 3, CheckpointStore(opened, 2).claim_lineage(now=0.0)))


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_checkpoint_with_any_byte_of_any_file_changed_is_refused(
    checkpoint: Path, name: str, at: float, mask: int
) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(at * len(content))] ^= mask
    path.write_bytes(damaged)
    try:
        with pytest.raises(CheckpointError, match="expected a whole checkpoint"):
            load_checkpoint(checkpoint)
    finally:
        path.write_bytes(content)
    assert load_checkpoint(checkpoint).state.manifest.step == 3


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_checkpoint_with_any_file_cut_short_is_refused(checkpoint: Path, name: str, at: float) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    path.write_bytes(content[: int(at * len(content))])
    try:
        with pytest.raises(CheckpointError, match="expected a whole checkpoint"):
            load_checkpoint(checkpoint)
    finally:
        path.write_bytes(content)


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_object_with_any_byte_changed_is_refused(memory_storage: Storage, name: str, at: float, mask: int) -> None:
    if not memory_storage.names():
        store = CheckpointStore(memory_storage.open(), 2)
        write(memory_storage.open(), 3, store.claim_lineage(now=0.0))
    content = memory_storage.read(1, 3, name)
    damaged = bytearray(content)
    damaged[int(at * len(content))] ^= mask
    memory_storage.put(1, 3, name, bytes(damaged))
    try:
        with pytest.raises(CheckpointError, match="expected a checkpoint that verifies"):
            CheckpointStore(memory_storage.open(), 2).newest()
    finally:
        memory_storage.put(1, 3, name, content)
