import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.consumers.training.checkpoints.storage import remove_leftovers
from streamrl.schemas.errors import DiskFull, LateExport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import WeightFile, WeightManifest, newest_lineage
from streamrl.schemas.weights import describe_file as described
from streamrl.weights.export import WeightExporter


def export(store: WeightExporter, number: int, tensors: dict[str, torch.Tensor] | None = None) -> str:
    tensors = tensors or {"w": torch.full((2, 3), float(number))}
    return store.export(tensors, {"config.json": "{}"}, PolicyVersion(1, number), number, now=5.0)


def test_the_manifest_describes_every_file_and_its_checksum_is_returned(tmp_path: Path) -> None:
    checksum = export(WeightExporter(tmp_path, 2), 3)
    content = (tmp_path / "1-3" / "manifest.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == checksum
    manifest = WeightManifest.model_validate_json(content)
    assert (manifest.version, manifest.step) == (PolicyVersion(1, 3), 3)
    assert {file.name for file in manifest.files} == {"model.safetensors", "config.json"}
    for file in manifest.files:
        data = (tmp_path / "1-3" / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256)
    assert torch.equal(load_file(tmp_path / "1-3" / "model.safetensors")["w"], torch.full((2, 3), 3.0))


def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    store = WeightExporter(tmp_path, 2)
    for number in range(12):
        export(store, number)
    assert store.versions() == [PolicyVersion(1, 10), PolicyVersion(1, 11)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-10", "1-11"]


def test_a_version_is_whole_or_absent(tmp_path: Path) -> None:
    store = WeightExporter(tmp_path, 2)
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError):
        export(store, 1, {"a": shared, "b": shared})
    assert list(tmp_path.iterdir()) == []


def test_an_export_writes_the_weights_once_reads_them_once_and_hashes_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sha256, hashed = WeightExporter(tmp_path / "weights", 2), hashlib.sha256, list[int]()

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self.digest = sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            hashed.append(len(data))
            self.digest.update(data)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Counting)
    tensors = {str(index): torch.zeros(1 << 18) for index in range(16)}
    before = _bytes_moved()
    export(store, 1, tensors)
    size = (store.root / "1-1" / "model.safetensors").stat().st_size
    read, written = (after - sooner for sooner, after in zip(before, _bytes_moved(), strict=True))
    assert size <= read < 1.1 * size
    assert size <= written < 1.1 * size
    assert size <= sum(hashed) < 1.1 * size


def _bytes_moved() -> tuple[int, int]:
    """Bytes that this thread has read, and has written, by system calls."""
    counts = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def test_a_full_disk_says_where_and_how_much_is_needed(tmp_path: Path) -> None:
    store = WeightExporter(tmp_path / "weights", keep=2)
    tensors = {"w": torch.zeros(250_000)}
    with pytest.raises(
        DiskFull, match=r"room for 1\.0 MB of weights in .*/weights \(version 1-7\).* MB free; make room"
    ):
        store.export(tensors, {"/dev/full": "{}"}, PolicyVersion(1, 7), 7, 0.0)
    assert store.versions() == []
    with pytest.raises(FileNotFoundError):
        store.export(tensors, {"not/there": "{}"}, PolicyVersion(1, 7), 7, 0.0)


def test_a_version_is_never_replaced(tmp_path: Path) -> None:
    store = WeightExporter(tmp_path, 2)
    export(store, 3)
    before = (tmp_path / "1-3" / "manifest.json").read_bytes()
    with pytest.raises(LateExport, match=r"expected no .*/1-3 yet, found one, which is kept"):
        export(store, 3, {"w": torch.zeros(2)})
    assert (tmp_path / "1-3" / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["1-3"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_late_export_of_an_older_lineage_is_refused_and_changes_nothing(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightExporter(tmp_path, 1)

    def newer() -> None:
        monkeypatch.undo()
        WeightExporter(tmp_path, 1).export({"w": torch.ones(2)}, {}, PolicyVersion(2, 1), 1, 0.0)

    if when == "before":
        newer()
    else:

        def meanwhile(path: Path) -> WeightFile:
            newer()
            return described(path)

        monkeypatch.setattr("streamrl.weights.export.describe_file", meanwhile)
    with pytest.raises(LateExport, match=r"expected nothing newer than 1-7 in .*, got weights of lineage 2"):
        export(store, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["2-1"]


def test_one_whose_half_written_files_were_cleared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cleared(path: Path) -> WeightFile:
        remove_leftovers(tmp_path)
        return described(path)

    monkeypatch.setattr("streamrl.weights.export.describe_file", cleared)
    with pytest.raises(LateExport, match="got it deleted half-way by another trainer"):
        export(WeightExporter(tmp_path, 1), 7)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_lineage_of_a_store_counts_what_is_not_whole_too(tmp_path: Path) -> None:
    assert newest_lineage(tmp_path / "none") == 0
    for name in ("2-9", "11-3", ".tmp-12-4-ab", "notes-1"):
        (tmp_path / name).mkdir()
    assert newest_lineage(tmp_path) == 11
