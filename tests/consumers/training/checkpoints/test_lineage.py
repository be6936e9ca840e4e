import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from streamrl.consumers.training.checkpoints.catalogue import Lineage, claim_lineage
from streamrl.consumers.training.checkpoints.storage import LocalStorage, ObjectStorage
from streamrl.schemas.errors import CheckpointError, SettingsError, Superseded
from tests.consumers.training.checkpoints.damaged_storage import Storage, own_environment

CLAIMANT = """
import sys
from pathlib import Path
from streamrl.consumers.training.checkpoints.catalogue import claim_lineage
from streamrl.consumers.training.checkpoints.storage import open_storage
opened = open_storage(sys.argv[1], Path(sys.argv[2]))
sys.stdin.readline()
print(*(claim_lineage(opened, at_least=1, now=0.0).number for _ in range(15)))
"""


def claim(storage: Storage, at_least: int = 1) -> Lineage:
    return claim_lineage(storage.open(), at_least=at_least, now=0.0)


def test_a_lineage_number_is_claimed_once(storage: Storage) -> None:
    assert [claim(storage).number for _ in range(3)] == [1, 2, 3]


def test_a_lineage_is_newer_than_the_checkpoint_it_continues(storage: Storage) -> None:
    assert claim(storage, at_least=8).number == 8
    assert claim(storage, at_least=2).number == 9


def test_the_older_of_two_trainers_is_superseded(storage: Storage) -> None:
    older = claim(storage)
    older.check()
    newer = claim(storage)
    newer.check()
    with pytest.raises(Superseded, match="expected lineage 1"):
        older.check()


def test_threads_that_claim_at_once_never_get_one_number(storage: Storage) -> None:
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda _: claim(storage).number, range(30)))
    assert sorted(numbers) == list(range(1, 31))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["local_storage", "s3_storage"])
def test_processes_that_claim_at_once_never_get_one_number(kind: str, request: pytest.FixtureRequest) -> None:
    storage: Storage = request.getfixturevalue(kind)
    command = [sys.executable, "-c", CLAIMANT, str(storage.url), str(storage.root)]
    claimants = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own_environment())
        for _ in range(3)
    ]
    for claimant in claimants:
        assert claimant.stdin is not None
        claimant.stdin.write("go\n")
        claimant.stdin.flush()
    numbers = [int(number) for claimant in claimants for number in claimant.communicate(timeout=60)[0].split()]
    assert sorted(numbers) == list(range(1, 46))


def test_a_store_that_overwrites_what_it_should_only_create_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda store, key, content, mode: put(store, key, content))
    with pytest.raises(SettingsError, match="conditional writes"):
        claim_lineage(ObjectStorage(MemoryStore(), "memory://x", tmp_path), at_least=1, now=0.0)


def test_a_location_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"expected to claim a lineage in .*file"):
        claim_lineage(LocalStorage(tmp_path / "file"), at_least=1, now=0.0)
