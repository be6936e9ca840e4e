"""Fingerprints of files and source code."""

import os
import sys
from pathlib import Path

import pytest

from streamrl.schemas import fingerprints
from streamrl.schemas.fingerprints import (
    code_fingerprint,
    files_fingerprint,
    hub_revision,
    package_version,
    project_sources,
)


def of(path: Path) -> str:
    return files_fingerprint({"": path})


def test_a_files_content_counts_and_not_its_name_or_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("one\ntwo\n")
    second.write_text("one\ntwo\n")
    os.utime(second, (1, 1))
    assert of(first) == of(second)
    second.write_text("one\ntwX\n")
    assert of(first) != of(second)


def test_files_that_trade_their_contents_differ(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    assert files_fingerprint({"a": one, "b": two}) != files_fingerprint({"a": two, "b": one})


@pytest.mark.parametrize("change", ["head", "tail", "size", "time"])
def test_of_a_large_file_both_ends_its_size_and_its_time_count(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 100)
    monkeypatch.setattr(fingerprints, "END_BYTES", 10)
    path = tmp_path / "large"
    content = b"x" * 200

    def write(text: bytes, at: int = 7) -> str:
        path.write_bytes(text)
        os.utime(path, (at, at))
        return of(path)

    before = write(content)
    assert write(content) == before
    changed = {"head": b"y" + content[1:], "tail": content[:-1] + b"y", "size": content + b"x", "time": content}
    assert write(changed[change], 8 if change == "time" else 7) != before


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a reward function whose helpers are a module and a package next to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "house_rewards.py").write_text(
        "import json\nimport house_words\ndef score():\n    from house_rules.lengths import most\n"
    )
    (tmp_path / "house_words.py").write_text("WORDS = 1\n")
    (tmp_path / "house_rules").mkdir()
    (tmp_path / "house_rules" / "__init__.py").write_text("")
    (tmp_path / "house_rules" / "lengths.py").write_text("from . import limits\nfrom .units import *\n")
    (tmp_path / "house_rules" / "limits.py").write_text("LIMIT = 1\n")
    (tmp_path / "house_rules" / "units.py").write_text("UNIT = 1\n")
    (tmp_path / "house_rules" / "unused.py").write_text("UNUSED = 1\n")
    (tmp_path / "unrelated.py").write_text("X = 1\n")
    return tmp_path


def test_the_sources_of_a_function_are_its_module_and_what_that_imports_of_its_project(project: Path) -> None:
    assert set(project_sources("house_rewards")) == {
        "house_rewards",
        "house_words",
        "house_rules",
        "house_rules.lengths",
        "house_rules.limits",
        "house_rules.units",
    }


@pytest.mark.parametrize(
    "name", ["house_rewards.py", "house_words.py", "house_rules/limits.py", "house_rules/units.py"]
)
def test_a_change_of_any_of_these_sources_is_noticed(name: str, project: Path) -> None:
    before = code_fingerprint("house_rewards:score")
    with (project / name).open("a") as file:
        file.write("# changed\n")
    assert before is not None
    assert code_fingerprint("house_rewards:score") not in (None, before)


@pytest.mark.parametrize("name", ["unrelated.py", "house_rules/unused.py"])
def test_a_change_elsewhere_is_none_of_the_function(name: str, project: Path) -> None:
    before = code_fingerprint("house_rewards:score")
    (project / name).write_text("Y = 2\n")
    assert code_fingerprint("house_rewards:score") == before


def test_code_is_read_and_not_run(project: Path) -> None:
    (project / "house_words.py").write_text("raise SystemExit\n")
    assert code_fingerprint("house_rewards:score") is not None
    assert not any(name.startswith("house_") for name in sys.modules)


def test_code_that_does_not_parse_has_a_fingerprint_too(project: Path) -> None:
    (project / "house_rewards.py").write_text("def score(:\n")
    assert code_fingerprint("house_rewards:score") is not None


def test_of_an_installed_package_only_the_package_itself_counts() -> None:
    assert {name.partition(".")[0] for name in project_sources("typer.main")} == {"typer"}


@pytest.mark.parametrize("path", ["no_such_module:f", "builtins:len", "sys:exit"])
def test_code_without_a_source_has_none(path: str) -> None:
    assert code_fingerprint(path) is None


def test_a_package_is_known_by_its_version() -> None:
    assert (package_version("pydantic") or "").startswith("pydantic 2")
    assert package_version("no-such-package") is None


def test_a_hub_that_does_not_answer_leaves_the_cached_commit_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def refuses(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuses)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub_revision("house/model", "model") is None
    commit = "c" * 40
    cached = tmp_path / "models--house--model"
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    assert hub_revision("house/model", "model") == commit
