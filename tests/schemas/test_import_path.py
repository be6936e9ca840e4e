import json
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from streamrl.deploy.local.evaluation import evaluate
from streamrl.deploy.local.forking import ForkServer
from streamrl.schemas.errors import RewardLoadError, SettingsError
from streamrl.schemas.import_path import load_function


def test_a_function_is_loaded_by_its_path() -> None:
    assert load_function("json:loads")("[1]") == [1]
    assert load_function("json:JSONDecoder.decode")(json.JSONDecoder(), "[1]") == [1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("json", "expected an import path"),
        ("json:", "expected an import path"),
        ("no_such_package_here:f", "expected to import 'no_such_package_here'"),
        ("json:load_s", "did you mean 'loads'"),
        ("json:JSONDecoder.nothing", "expected a function 'JSONDecoder.nothing' in json, got none"),
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


def test_a_module_next_to_the_configuration_needs_a_start_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SettingsError, match=rf"started, which is {tmp_path}: start it in the directory where it is$"):
        load_function("rewards_of_nobody:score")
    (tmp_path / "my-task").mkdir()
    (tmp_path / "my-task" / "rewards_of_nobody.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(SettingsError, match=rf"start it in {tmp_path}/my-task, where it is$"):
        load_function("rewards_of_nobody:score")
    monkeypatch.chdir(tmp_path / "my-task")
    with pytest.raises(SettingsError, match=r"got ModuleNotFoundError: No module named 'nothing_of_this_name'$"):
        load_function("rewards_of_nobody:score")


def test_a_module_that_fails_while_loading_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_broken_task.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SettingsError, match=r"own_broken_task.*RuntimeError: no licence"):
        load_function("own_broken_task:f")


@pytest.fixture(params=["settings.py", "schemas/__init__.py", "bus/__init__.py", "deploy.py"])
def named_like_ours(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory, named like a package of ours within ``streamrl``."""
    file = tmp_path / str(request.param)
    file.parent.mkdir(exist_ok=True)
    file.write_text("def mine(*given, **named):\n    return {'metrics': {}, 'samples': []}\n")
    monkeypatch.chdir(tmp_path)
    return Path(str(request.param).partition("/")[0]).stem


@pytest.mark.processes
def test_a_module_named_like_a_package_of_ours_is_loaded_by_the_reward_process(named_like_ours: str) -> None:
    command = [sys.executable, "-P", "-m", "streamrl.producers.rewards.child", f"{named_like_ours}:mine", "5"]
    # It ends what is left of its session, so it has one of its own.
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False, start_new_session=True)
    assert msgpack.unpackb(done.stdout) == ["ready", False], done.stderr.decode()


@pytest.mark.processes
def test_a_module_named_like_a_package_of_ours_is_loaded_by_the_evaluation_process(
    named_like_ours: str, tmp_path: Path
) -> None:
    with ForkServer(()) as models:
        assert evaluate(f"{named_like_ours}:mine", tmp_path, 0, models).samples == []


def test_functions_of_our_own_can_be_named_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_function("streamrl.schemas.identifiers:group_id_of")("a/0/1/2") == "a/0/1"
