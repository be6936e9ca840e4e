"""Fingerprints of the prompts' data."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.prompts import fingerprints
from streamrl.producers.prompts.fingerprints import prompts_fingerprint
from streamrl.producers.prompts.settings import DataSettings


def of(path: Path | None = None, **changes: Any) -> str | None:
    return prompts_fingerprint(DataSettings(**({} if path is None else {"path": str(path)}) | changes))


def test_one_changed_row_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n')
    before = of(path)
    path.write_text('{"prompt": "1+1", "answer": "3"}\n')
    assert before is not None
    assert of(path) not in (None, before)
    path.write_text('{"prompt": "1+1", "answer": "2"}\n')
    assert of(path) == before


def test_the_files_of_a_directory_count_and_caches_do_not(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    before = of(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl.metadata").write_text("now")
    (tmp_path / "cache-12ab.arrow").write_text("made by the library")
    assert of(tmp_path) == before
    (tmp_path / "data" / "more.jsonl").write_text("{}\n")
    assert of(tmp_path) != before


def test_a_hub_data_set_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "hub_revision", lambda path, kind: f"{kind} {path}")
    assert of(Path("house/riddles")) == "dataset house/riddles"


def test_generated_prompts_are_known_by_the_librarys_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "package_version", lambda name: f"{name} 1.2")
    assert of(dataset="chain_sum") == "reasoning-gym 1.2"
    assert of(requests_only=True) is None
