import subprocess
import sys
import tomllib
from pathlib import Path

import msgpack
import pytest

from deploy.local.evaluation import evaluate
from schemas.errors import RewardLoadError, SettingsError, UserError
from schemas.import_path import OWN_PACKAGES, load_function

ROOT = Path(__file__).parents[2]


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


def test_a_module_beside_the_configuration_is_found_by_who_starts_there(
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


class TestAModuleThatOneOfOurPackagesHides:
    """The working directory holds a module named as one of ours, and a setting names it."""

    @pytest.fixture(params=["settings.py", "schemas/__init__.py", "streamrl/tasks.py"])
    def hidden(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """What the user is to rename."""
        file = tmp_path / str(request.param)
        file.parent.mkdir(exist_ok=True)
        file.write_text("def mine(*given, **named):\n    return 1.0\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        return file if file.parent == tmp_path else file.parent

    def refusal(self, hidden: Path) -> str:
        return f"StreamRL's own package '{hidden.stem}', which hides your {hidden.name}: rename {hidden}, for example"

    def test_is_refused_by_name_with_the_way_out(self, hidden: Path) -> None:
        with pytest.raises(RewardLoadError) as caught:
            load_function(f"{hidden.stem}:mine", RewardLoadError)
        assert self.refusal(hidden) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_is_refused_where_the_users_own_module_imports_it(self, hidden: Path) -> None:
        Path("my_task_of_user.py").write_text(f"from {hidden.stem} import mine\n")
        with pytest.raises(SettingsError) as caught:
            load_function("my_task_of_user:mine")
        assert self.refusal(hidden) in str(caught.value)

    def test_is_refused_by_the_reward_process(self, hidden: Path) -> None:
        command = [sys.executable, "-P", "-m", "producers.rewards.child", f"{hidden.stem}:mine", "5"]
        done = subprocess.run(command, input=b"", capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr.decode()
        greeting, reason = msgpack.unpackb(done.stdout)
        assert greeting == "failed"
        assert self.refusal(hidden) in reason

    def test_is_refused_by_the_evaluation_process(self, hidden: Path) -> None:
        with pytest.raises(UserError) as caught:
            evaluate(f"{hidden.stem}:mine", hidden, 0)
        assert self.refusal(hidden) in str(caught.value)


def test_functions_of_our_own_packages_can_be_named_from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load_function("schemas.identifiers:group_id_of")("a/0/1/2") == "a/0/1"


def test_the_packages_known_to_hide_others_are_those_that_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in found} == OWN_PACKAGES
