import sys
from pathlib import Path

import pytest

from schemas.errors import RewardLoadError, SettingsError
from schemas.import_path import load_function


def test_a_function_is_loaded_by_its_path() -> None:
    assert load_function("json:loads")("[1]") == [1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("json", "expected an import path"),
        ("json:", "expected an import path"),
        ("no_such_package_here:f", "expected to import 'no_such_package_here'"),
        ("json:load_s", "did you mean 'loads'"),
        ("json:__doc__", "expected a function '__doc__' in json, got str"),
    ],
)
def test_a_wrong_path_gives_one_line_that_says_what_is_wrong(path: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_function(path)
    assert "\n" not in str(caught.value)


def test_the_caller_names_the_error() -> None:
    with pytest.raises(RewardLoadError):
        load_function("json", RewardLoadError)


def test_the_working_directory_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("def loads(text):\n    return 'shadow'\n")
    (tmp_path / "own_task_of_user.py").write_text("def keep(entry):\n    return True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    assert load_function("own_task_of_user:keep")({}) is True
    assert sys.path == [*before, str(tmp_path)]
    assert load_function("json:loads")("[1]") == [1]
    del sys.modules["own_task_of_user"]


def test_a_module_that_fails_while_loading_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken_task.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SettingsError, match=r"own_broken_task.*RuntimeError: no licence"):
        load_function("own_broken_task:f")
