"""If a checkpoint cannot be written, earlier ones are unchanged, and a one-line error says what is missing."""

import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.exceptions import GenericError
from obstore.store import ObjectStore

from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.schemas.errors import CheckpointError
from tests.consumers.training.checkpoints.damaged_storage import Storage, newest, state_of, versions, write, write_model

Usage = namedtuple("Usage", ["total", "used", "free"])


def begin(storage: Storage) -> Lineage:
    lineage = CheckpointStore(storage.open(), 3).claim_lineage(now=0.0)
    write(storage.open(), 1, lineage)
    return lineage


def assert_as_before(storage: Storage) -> None:
    assert versions(storage.open()) == [(1, 1)]
    assert newest(storage.open()) == (1, 1)
    assert not list(storage.root.rglob(".tmp-*"))


def test_a_full_disk_leaves_the_checkpoints_as_they_were(storage: Storage) -> None:
    lineage = begin(storage)

    def fill(directory: Path) -> None:
        write_model(directory)
        with Path("/dev/full").open("wb") as file:
            file.write(b"one more byte")

    with pytest.raises(CheckpointError, match=r"about [0-9]+ bytes to .*step_2.*No space left.*[0-9]+ bytes are free"):
        CheckpointStore(storage.open(), 3).write(state_of(1, 2), fill, lineage)
    assert_as_before(storage)
    write(storage.open(), 2, lineage)
    assert newest(storage.open()) == (1, 2)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_tensor_file_that_the_system_cuts_off_leaves_the_checkpoints_as_they_were(storage: Storage) -> None:
    lineage = begin(storage)
    state = state_of(1, 2)
    state = replace(state, optimizer={**state.optimizer, "w.exp_avg_sq": torch.zeros(1 << 16)})
    with largest_file(1 << 16), pytest.raises(CheckpointError, match="File too large"):
        CheckpointStore(storage.open(), 3).write(state, write_model, lineage)
    assert_as_before(storage)


def test_too_little_space_is_noticed_before_anything_is_written(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = begin(storage)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 80, 20))

    def never(directory: Path) -> None:
        raise AssertionError("expected no write")

    with pytest.raises(CheckpointError, match=r"expected [0-9]+ bytes free in .* got 20"):
        CheckpointStore(storage.open(), 3).write(state_of(1, 2), never, lineage)
    assert_as_before(storage)


def test_a_store_that_fails_half_way_leaves_the_checkpoints_as_they_were(
    s3_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = begin(s3_storage)
    put = obstore.put

    def failing(store: ObjectStore, key: str, *arguments: Any, **options: Any) -> Any:
        if key.endswith("rng.safetensors"):
            raise GenericError("the connection was reset\n\nDebug source: …")
        return put(store, key, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", failing)
        with pytest.raises(
            CheckpointError, match=r"\Aexpected to write .*step_2, got: the connection was reset \(.*\Z"
        ):
            write(s3_storage.open(), 2, lineage)
    assert_as_before(s3_storage)
    write(s3_storage.open(), 3, lineage)
    assert not [name for name in s3_storage.names() if "step_2" in name]
