"""A late writer and its successor leave a complete checkpoint or none, in any order of their requests.

The writer has read the claims for the last time. Its successor claims a lineage and clears leftovers before, while or
after the writer's last request arrives. Each test repeats this for every position between two requests.
"""

import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError
from structlog.testing import capture_logs

from streamrl.consumers.training.checkpoints.catalogue import Lineage, read_entries
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.schemas.errors import CheckpointError, Superseded
from streamrl.schemas.weights import TEMPORARY_PREFIX
from tests.consumers.training.checkpoints.damaged_storage import Storage, identity, write

REQUESTS = ("put", "get", "delete", "list")
FIRST, LATER = 0, 1


class Crash(BaseException):
    """Stands for the death of the process. The code under test must not catch it."""


def claim(storage: Storage) -> Lineage:
    return CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)


def begun(storage: Storage, earlier: int) -> Lineage:
    """The lineage of a trainer that is about to write step 6, as its first checkpoint or a later one."""
    lineage = claim(storage)
    if earlier:
        write(storage.open(), 4, lineage)
    return lineage


def found_by_the_next_start(storage: Storage) -> tuple[int, int] | None:
    """The version that the next trainer continues from; checks that no checkpoint is damaged."""
    claim(storage)
    store = CheckpointStore(storage.open(), 2)
    with capture_logs() as logs:
        restored = store.newest()
    assert logs == []
    for entry in read_entries(storage.open()):
        assert entry.manifest is not None, entry.problem
        store.load(entry.manifest, entry.slot)
    return None if restored is None else identity(restored)


def before_request(patch: pytest.MonkeyPatch, moment: int, act: Callable[[], object]) -> "itertools.count[int]":
    """Call ``act`` before request number ``moment``; returns the counter of requests."""
    counted = itertools.count()

    def passing(function: Any, *arguments: Any, **options: Any) -> Any:
        if next(counted) == moment:
            act()
        return function(*arguments, **options)

    for name in REQUESTS:
        patch.setattr(obstore, name, partial(passing, getattr(obstore, name)))
    return counted


def upload_with_its_manifest_under_way(
    storage: Storage, lineage: Lineage, failure: BaseException, opened: Any = None
) -> Callable[[], None]:
    """Write step 6, but hold back its last request and raise ``failure``; returns what lets the request arrive."""
    under_way: list[Callable[[], object]] = []
    put = obstore.put

    def held_up(*arguments: Any, **options: Any) -> Any:
        if str(arguments[1]).endswith("manifest.json"):
            under_way.append(partial(put, *arguments, **options))
            raise failure
        return put(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "put", held_up)
        with pytest.raises((Crash, CheckpointError)):
            write(opened or storage.open(), 6, lineage)
    (last,) = under_way

    def arrive() -> None:
        with suppress(AlreadyExistsError):
            last()

    return arrive


@pytest.mark.parametrize("earlier", [FIRST, LATER])
def test_cleared_files_never_become_a_checkpoint_whenever_its_manifest_arrives(tmp_path: Path, earlier: int) -> None:
    before = (1, 4) if earlier else None
    found = []
    for moment in itertools.count():
        storage = Storage(f"memory://{tmp_path.name}-{moment}", tmp_path)
        arrive = upload_with_its_manifest_under_way(storage, begun(storage, earlier), Crash())
        with pytest.MonkeyPatch.context() as patch:
            counted = before_request(patch, moment, arrive)
            claim(storage)
        arrive()
        found.append(found_by_the_next_start(storage))
        if next(counted) <= moment:
            break
    assert set(found) == {before, (1, 6)}
    assert found == sorted(found, key=lambda version: version == before), "only a manifest that arrives early counts"


@pytest.mark.parametrize("earlier", [FIRST, LATER])
def test_a_successor_that_claims_and_clears_between_any_two_requests(tmp_path: Path, earlier: int) -> None:
    before = (1, 4) if earlier else None
    found = []
    for moment in itertools.count():
        storage = Storage(f"memory://{tmp_path.name}-{moment}", tmp_path)
        lineage = begun(storage, earlier)
        ended = "written"
        with pytest.MonkeyPatch.context() as patch:
            counted = before_request(patch, moment, partial(claim, storage))
            try:
                write(storage.open(), 6, lineage)
            except Superseded:
                ended = "superseded"
        found.append((ended, found_by_the_next_start(storage)))
        if next(counted) <= moment:
            break
    assert set(found) == {("superseded", before), ("written", (1, 6))}


@pytest.mark.parametrize("dies", [False, True])
def test_a_manifest_of_a_first_attempt_that_arrives_during_the_second(tmp_path: Path, dies: bool) -> None:
    found = []
    for moment in itertools.count():
        storage = Storage(f"memory://{tmp_path.name}-{moment}", tmp_path)
        lineage, opened = begun(storage, FIRST), storage.open()
        arrive = upload_with_its_manifest_under_way(storage, lineage, GenericError("no answer"), opened)

        def happen(arrive: Callable[[], None] = arrive) -> None:
            arrive()
            if dies:
                raise Crash

        with pytest.MonkeyPatch.context() as patch:
            counted = before_request(patch, moment, happen)
            with suppress(Crash):
                write(opened, 6, lineage)
        arrive()
        found.append(found_by_the_next_start(storage))
        if next(counted) <= moment:
            break
    assert set(found) == ({(1, 6), None} if dies else {(1, 6)})


def test_a_retried_upload_uses_new_keys(memory_storage: Storage) -> None:
    lineage, opened = claim(memory_storage), memory_storage.open()
    late, put = [], obstore.put
    with pytest.MonkeyPatch.context() as patch:

        def lost(store: Any, key: str, content: Path, **options: Any) -> Any:
            late.append(partial(put, store, key, content.read_bytes()))
            raise GenericError("no answer")

        patch.setattr(obstore, "put", lost)
        with pytest.raises(CheckpointError, match="no answer"):
            write(opened, 6, lineage)
    write(opened, 6, lineage)
    before = {name for name in memory_storage.names() if name.startswith("lineage_1/")}
    late[0]()
    assert len({name for name in memory_storage.names() if name.startswith("lineage_1/")} - before) == 1
    assert found_by_the_next_start(memory_storage) == (1, 6)


def test_missing_files_that_were_not_cleared_give_one_line(memory_storage: Storage) -> None:
    write(memory_storage.open(), 6, claim(memory_storage))
    for name in ("config.json", "model.safetensors", "trainer_state/intake.json"):
        memory_storage.put(1, 6, name, None)
    claim(memory_storage)
    with pytest.raises(CheckpointError, match=r"\Aexpected a checkpoint that verifies in .* not found.*\Z"):
        CheckpointStore(memory_storage.open(), 2).newest()


@pytest.mark.parametrize("earlier", [FIRST, LATER])
def test_a_directory_that_gets_its_name_while_it_is_cleared(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    lineage = begun(local_storage, earlier)
    root, remove = local_storage.root / "checkpoints", shutil.rmtree
    staged = root / f"{TEMPORARY_PREFIX}1-step_6"

    def half_way(path: Path, **options: Any) -> None:
        """Delete one file, then let the late writer rename the directory."""
        if (path / "config.json").exists():
            (path / "config.json").unlink()
            with suppress(FileNotFoundError):
                staged.rename(root / "step_6")
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Lineage, "check", _die)
        write(local_storage.open(), 6, lineage)
    assert staged.is_dir()
    monkeypatch.setattr(shutil, "rmtree", half_way)
    assert found_by_the_next_start(local_storage) == ((1, 4) if earlier else None)
    assert not [name for name in local_storage.names() if TEMPORARY_PREFIX in name]


def _die(lineage: Lineage) -> None:
    raise Crash
