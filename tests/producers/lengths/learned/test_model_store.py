import os
from pathlib import Path
from typing import Literal

import pytest

from streamrl.producers.lengths.learned.model_store import KEPT_VERSIONS, MANIFEST, Manifest, ModelStore, read_manifest
from streamrl.schemas.errors import MalformedFrame, ModelError


def _manifest(version: int) -> Manifest:
    return Manifest(version=version, policy_version=4, observations=9, levels={"a": (3.0, 40)}, details={"scale": 0.5})


def _write(folder: Path) -> None:
    (folder / "weights").write_bytes(b"12345678901234567890")


def _version(path: Path, manifest: Manifest) -> int:
    assert (path / "weights").read_bytes()
    return manifest.version


@pytest.mark.parametrize("kind", ["trees", "language"])
def test_the_newest_is_loaded_and_only_the_last_few_are_kept(
    tmp_path: Path, kind: Literal["trees", "language"]
) -> None:
    store = ModelStore(tmp_path / "models", kind)
    for version in range(1, KEPT_VERSIONS + 3):
        store.save(_manifest(version), _write)
    assert len(list(store.folder.iterdir())) == KEPT_VERSIONS
    assert store.load_newest(_version) == KEPT_VERSIONS + 2
    assert store.load_newest(_version, newer_than=KEPT_VERSIONS + 2) is None


@pytest.mark.parametrize("harm", [MANIFEST, "weights"])
def test_damaged_versions_are_skipped(tmp_path: Path, harm: str) -> None:
    store = ModelStore(tmp_path, "trees")
    store.save(_manifest(1), _write)
    second = store.save(_manifest(2), _write)
    os.truncate(second / harm, 10)
    with pytest.raises(MalformedFrame):
        read_manifest(second)
    newest = store.newest()
    assert newest is not None
    assert (newest[1].version, store.load_newest(_version), store.next_version()) == (1, 1, 3)


def test_a_version_that_its_library_cannot_load_gives_way(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, "language")
    for version in (1, 2):
        store.save(_manifest(version), _write)

    def read(path: Path, manifest: Manifest) -> int:
        if manifest.version == 2:
            raise ModelError("of a newer library")
        return manifest.version

    assert store.load_newest(read) == 1


def test_a_version_is_complete_or_absent(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, "trees")

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="space"):
        store.save(_manifest(1), write)
    assert list(tmp_path.iterdir()) == []
    assert store.load_newest(_version) is None


def test_two_kinds_share_a_folder(tmp_path: Path) -> None:
    ModelStore(tmp_path, "trees").save(_manifest(7), _write)
    assert ModelStore(tmp_path, "language").newest() is None
    assert ModelStore(tmp_path, "language").next_version() == 1


def test_a_folder_that_is_not_there_has_no_model(tmp_path: Path) -> None:
    assert ModelStore(tmp_path / "nowhere", "trees").load_newest(_version) is None


def test_a_version_is_not_written_twice(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, "trees")
    store.save(_manifest(1), _write)
    with pytest.raises(OSError):
        store.save(_manifest(1), _write)
