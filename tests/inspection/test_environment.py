import subprocess
from pathlib import Path

import pytest

from streamrl.inspection.environment import commit_of, environment, fitted_here, model_config
from streamrl.settings.loading import load_settings

pytestmark = pytest.mark.processes


def test_the_environment_names_hardware_versions_and_no_path() -> None:
    found = environment()
    assert {"CPU", "memory", "Python", "torch", "aiokafka"} <= found.keys()
    assert all(found.values())
    assert not any("/home" in text or "/root" in text for text in found.values())


def test_a_commit_is_named_with_whether_files_were_changed(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("one")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / "f").write_text("two")
    assert commit_of(tmp_path) == f"{clean}, with changes"


def test_a_folder_in_no_repository_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    assert commit_of(tmp_path / "absent") == ""


def test_a_models_configuration_is_read_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)  # no devices
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = load_settings(None, ["--data.dataset=chain_sum", "--run.name=x", f"--model.path={tmp_path}"])
    assert model_config(settings) == {}, "there is none"
    (tmp_path / "config.json").write_text("[")
    assert model_config(settings) == {}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert model_config(settings) == {"model_type": "qwen3"}
    assert fitted_here(settings)[0].training.packing == "shared"
    absent = load_settings(None, ["--data.dataset=chain_sum", "--run.name=x", "--model.path=nobody/nothing"])
    assert model_config(absent) == {}
    assert fitted_here(absent)[0].training.packing == "padded"
