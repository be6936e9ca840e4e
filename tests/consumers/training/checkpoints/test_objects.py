import json
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from structlog.testing import capture_logs

from streamrl.consumers.training.checkpoints import storage as storage_module
from streamrl.consumers.training.checkpoints.catalogue import Lineage, claim_lineage, newest_model
from streamrl.consumers.training.checkpoints.storage import ObjectStorage, check_storage, open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.schemas.errors import CheckpointError, SettingsError
from streamrl.schemas.identifiers import PolicyVersion
from tests.consumers.training.checkpoints.damaged_storage import (
    Storage,
    newest,
    s3_environment,
    state_of,
    versions,
    write,
    write_model,
)

NO_KEY = {"private_key": "", "private_key_id": "", "client_email": ""}
"""The key of a service account that never has to sign anything."""


def claimed(storage: Storage) -> Lineage:
    return CheckpointStore(storage.open(), 2).claim_lineage(now=0.0)


def test_the_manifest_comes_last(memory_storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    put = obstore.put

    def noted(store: obstore.store.MemoryStore, key: str, *arguments: object, **options: object) -> object:
        keys.append(key)
        return put(store, key, *arguments, **options)  # type: ignore[arg-type]

    lineage = claimed(memory_storage)
    monkeypatch.setattr(obstore, "put", noted)
    write(memory_storage.open(), 2, lineage)
    assert len(keys) == 7
    assert keys[-1] == "lineage_1/step_2/trainer_state/manifest.json"


def test_no_lineage_writes_over_another(s3_storage: Storage) -> None:
    first = claimed(s3_storage)
    write(s3_storage.open(), 4, first)
    before = {name: s3_storage.read(1, 4, name) for name in ("model.safetensors", "trainer_state/manifest.json")}
    second = claimed(s3_storage)
    write(s3_storage.open(), 6, second, PolicyVersion(1, 4))
    write(s3_storage.open(), 8, second, PolicyVersion(1, 4))
    assert {name: s3_storage.read(1, 4, name) for name in before} == before
    assert versions(s3_storage.open()) == [(2, 8), (2, 6), (1, 4)]


def test_an_upload_that_never_ended_is_no_checkpoint_and_goes_with_the_next_lineage(s3_storage: Storage) -> None:
    write(s3_storage.open(), 4, claimed(s3_storage))
    s3_storage.put(1, 6, "model.safetensors", b"half")
    s3_storage.put(1, 60, "model.safetensors", b"half")
    assert versions(s3_storage.open()) == [(1, 4)]
    claimed(s3_storage)
    assert not [name for name in s3_storage.names() if "step_6" in name]
    assert newest(s3_storage.open()) == (1, 4)


LATE = ["config.json", "model.safetensors", "trainer_state/intake.json", "trainer_state/manifest.json"]


@pytest.mark.parametrize("name", LATE)
def test_a_late_upload_of_a_superseded_trainer_is_not_taken_for_its_successors(
    memory_storage: Storage, name: str
) -> None:
    """Both write the same step. A request of the older one arrives before or after the newer one's checkpoint."""
    write(memory_storage.open(), 4, claimed(memory_storage))
    first = Lineage(1, memory_storage.open())
    write(memory_storage.open(), 6, first)
    late = memory_storage.read(1, 6, name)
    for each in [key for key in memory_storage.names() if "lineage_1/step_6/" in key]:
        memory_storage.put(1, 6, each.partition("step_6/")[2], None)
    second = claimed(memory_storage)
    memory_storage.put(1, 6, name, late)
    assert newest(memory_storage.open()) == (1, 4), "before the newer one has a checkpoint"
    write(memory_storage.open(), 6, second, PolicyVersion(1, 4))
    memory_storage.put(1, 6, name, late)
    assert newest(memory_storage.open()) == (2, 6)
    write(memory_storage.open(), 8, second, PolicyVersion(1, 4), keep=3)
    claimed(memory_storage)
    assert not [key for key in memory_storage.names() if "lineage_1/step_6/" in key]


def test_a_trainer_that_stood_still_clears_nothing_of_its_successor_s_upload(memory_storage: Storage) -> None:
    write(memory_storage.open(), 4, claimed(memory_storage))
    slow = claim_lineage(memory_storage.open(), at_least=1, now=0.0)
    claimed(memory_storage)
    memory_storage.put(1, 6, "model.safetensors", b"of an older one")
    memory_storage.put(3, 6, "model.safetensors", b"under way")
    memory_storage.open().clear_leftovers(slow.number)
    assert not [key for key in memory_storage.names() if "lineage_1/step_6/" in key]
    assert memory_storage.read(3, 6, "model.safetensors") == b"under way"


def test_an_object_that_grew_is_not_downloaded(memory_storage: Storage) -> None:
    write(memory_storage.open(), 4, claimed(memory_storage))
    memory_storage.put(1, 4, "model.safetensors", b"x" * 10_000)
    with pytest.raises(CheckpointError, match=r"expected at most .* bytes in .*model.safetensors, got 10000"):
        CheckpointStore(memory_storage.open(), 2).newest()


def test_a_large_file_goes_up_in_parts_and_comes_back_whole(s3_storage: Storage) -> None:
    lineage = claimed(s3_storage)
    content = bytes(range(256)) * (20 << 12)

    def large(directory: Path) -> None:
        write_model(directory)
        (directory / "model.bin").write_bytes(content)

    CheckpointStore(s3_storage.open(), 2).write(state_of(1, 2), large, lineage)
    restored = CheckpointStore(s3_storage.open(), 2).newest()
    assert restored is not None
    assert (restored.directory / "model.bin").read_bytes() == content


def test_a_restored_checkpoint_is_downloaded_into_the_cache(s3_storage: Storage, tmp_path: Path) -> None:
    write(s3_storage.open(), 2, claimed(s3_storage))
    opened = open_storage(s3_storage.url, tmp_path / "other")
    restored = CheckpointStore(opened, 2).newest()
    assert restored is not None
    assert restored.directory == tmp_path / "other" / "restored" / "lineage_1" / "step_2"
    opened.clear_leftovers(2)
    assert not list((tmp_path / "other").iterdir())


def test_a_store_that_does_not_answer_is_named_in_one_line(
    s3_storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = obstore.store.S3Store(
        "bucket", endpoint="http://127.0.0.1:1", client_options={"allow_http": True}, retry_config={"max_retries": 0}
    )
    opened = ObjectStorage(store, "s3://bucket/x", tmp_path)
    lineage = Lineage(1, opened)
    with pytest.raises(CheckpointError, match=r"\Aexpected to read the lineage claims in s3://bucket/x, got: .*\Z"):
        lineage.check()
    with pytest.raises(CheckpointError, match=r"\Aexpected to list the checkpoints in s3://bucket/x, got: .*\Z"):
        CheckpointStore(opened, 2).newest()


def test_an_object_that_is_missing_is_named_in_one_line(s3_storage: Storage) -> None:
    write(s3_storage.open(), 4, claimed(s3_storage))
    s3_storage.put(1, 4, "config.json", None)
    with pytest.raises(CheckpointError, match=r"\Aexpected a checkpoint that verifies.*config.json not found.*\Z"):
        CheckpointStore(s3_storage.open(), 2).newest()


def test_plain_http_beyond_this_machine_takes_an_explicit_word(
    s3_storage: Storage, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint.replace("127.0.0.1", "0.0.0.0"))
    with pytest.raises(CheckpointError, match="expected to list the checkpoints"):
        CheckpointStore(s3_storage.open(), 2).newest()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert CheckpointStore(s3_storage.open(), 2).newest() is None


def test_a_memory_location_is_the_same_for_all_who_open_it(memory_storage: Storage, tmp_path: Path) -> None:
    write(memory_storage.open(), 2, claimed(memory_storage))
    assert newest(open_storage(f"{memory_storage.url}/", tmp_path)) == (1, 2)


def test_a_trainer_without_permission_to_delete_trains_on_and_warns_once(
    s3_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_store: object, key: str) -> None:
        raise PermissionDeniedError(f"AccessDenied: not authorized to perform s3:DeleteObject on {key}\n\nmore")

    write(s3_storage.open(), 2, claimed(s3_storage))
    s3_storage.put(1, 3, "model.safetensors", b"an upload that never ended")
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(obstore, "delete", denied)
        store = CheckpointStore(s3_storage.open(), 1)
        lineage = store.claim_lineage(now=0.0)
        for step in (3, 4, 5):
            store.write(state_of(lineage.number, step, PolicyVersion(1, 2)), write_model, lineage)
    assert lineage.number == 2
    (warning,) = logs
    assert "s3:DeleteObject" in warning["problem"]
    assert "\n" not in warning["problem"]
    assert newest(s3_storage.open()) == (2, 5)
    assert versions(s3_storage.open()) == [(2, 5), (2, 4), (2, 3), (1, 2)]
    write(s3_storage.open(), 6, lineage, PolicyVersion(1, 2), keep=1)
    assert versions(s3_storage.open()) == [(2, 6)], "old checkpoints are deleted once this is allowed again"


@pytest.mark.parametrize("location", ["s3://bucket/x", "gs://bucket/x"])
def test_a_store_that_cannot_be_reached_is_the_users_to_mend(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    account = json.dumps({"gcs_base_url": "http://127.0.0.1:1", "disable_oauth": True} | NO_KEY)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", account)
    monkeypatch.setattr(storage_module, "CHECK_PATIENCE", timedelta(seconds=0.1))
    with pytest.raises(
        SettingsError, match=r"\Aexpected to list training.checkpoint_location = .* check .* credentials.*\Z"
    ):
        check_storage(location)


def test_a_store_without_credentials_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    # On an Amazon machine, this address gives credentials. Here nothing listens.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(storage_module, "CHECK_PATIENCE", timedelta(seconds=0.1))
    with pytest.raises(SettingsError, match=r"s3://bucket/x.*127.0.0.1:1.*credentials"):
        check_storage("s3://bucket/x")


def test_a_store_that_answers_passes(s3_storage: Storage, tmp_path: Path) -> None:
    check_storage(s3_storage.url)
    check_storage(tmp_path / "not" / "there" / "yet")


def test_the_newest_model_is_that_of_the_newest_lineage(storage: Storage, tmp_path: Path) -> None:
    assert newest_model(storage.url, tmp_path / "c") is None
    write(storage.open(), 6, claimed(storage))
    write(storage.open(), 4, claimed(storage), PolicyVersion(1, 2), keep=5)
    found = newest_model(storage.url, tmp_path / "c")
    assert found is not None
    assert found.name == "step_4"
    assert (found / "model.safetensors").exists()
