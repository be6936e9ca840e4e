import os
import stat
from pathlib import Path

import pytest

from streamrl.demo.recipe import defaults
from streamrl.demo.task import Question
from streamrl.demo.warm_start import WarmStartRecipe
from streamrl.init import examples
from streamrl.init.examples import as_commented_toml, example, write_example
from streamrl.producers.environments.settings import EnvironmentSettings
from streamrl.producers.environments.shipped import Calculator
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.errors import UserError
from streamrl.schemas.import_path import load_function
from streamrl.settings.keys import known_keys
from streamrl.settings.loading import load_settings, validated
from streamrl.settings.run_directory import plain_run_name


def test_the_written_configuration_is_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, *_ = write_example(tmp_path / "My Task", "math", print)
    monkeypatch.chdir(config.parent)
    settings = load_settings(config, [])
    assert settings.run.name == "my-task"
    assert settings.model.path.startswith("Qwen/")
    prompt = open_source(settings.data).prompt_at(0)[0]
    assert not isinstance(prompt.content, str)
    assert set(prompt.columns) == {"answer"}


def test_commented_settings_of_examples_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commented setting can be enabled, except the subset: a single file has no subsets."""
    for name in ("math", "tiny", "calculator"):
        made = example(name, "x")
        assert {entry.key for entry in made.entries} <= set(known_keys())
        text = as_commented_toml(made.head, made.entries)
        active = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
        path = tmp_path / f"{name}.toml"
        path.write_text(active.replace("# data", "data"))
        load_settings(path, [])


def test_the_demo_as_files_is_the_demo(tmp_path: Path) -> None:
    made = example("demo", "demo")
    config = tmp_path / "streamrl.toml"
    config.write_text(as_commented_toml(made.head, made.entries))
    settings = load_settings(config, [])
    same = validated(defaults("transformers", 0) | {"model": {"path": "./model"}, "data": {"path": "prompts.jsonl"}})
    assert settings.model_copy(update={"run": same.run}) == same
    assert settings.run.model_copy(update={"name": ""}) == same.run
    assert len(made.prompts.splitlines()) > settings.training.max_steps * settings.loop.groups_per_step


def test_a_conversation_of_the_calculator_fits_into_its_model(tmp_path: Path) -> None:
    made = example("calculator", "x")
    config = tmp_path / "streamrl.toml"
    config.write_text(as_commented_toml(made.head, made.entries))
    settings = load_settings(config, [])
    assert settings.section(EnvironmentSettings).names == ("calculator",)
    assert Calculator().request["max_tokens"] <= settings.loop.max_completion_length
    positions = WarmStartRecipe().shape.max_position_embeddings
    assert settings.loop.max_prompt_length + settings.loop.max_completion_length <= positions
    # Four summands of two digits, and the calculator's answer to each line of the solution.
    longest = Question("+", (99, 99, 99, 99))
    assert len(longest.text + longest.worked(" ")) < settings.loop.max_prompt_length


def test_missing_files_are_written_and_existing_ones_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier start was killed before it wrote the configuration, which is the last file."""
    cached = tmp_path / "cache"
    cached.mkdir()
    (cached / "model.safetensors").write_bytes(b"weights")
    (cached / "model.safetensors").chmod(0o600)
    monkeypatch.setattr(examples, "_warm_started", lambda progress: cached)
    task = tmp_path / "task"
    task.mkdir()
    (task / "prompts.jsonl").write_text("mine")
    write_example(task, "tiny", print, if_missing=True)
    assert (task / "prompts.jsonl").read_text() == "mine"
    assert sorted(path.name for path in task.iterdir()) == ["model", "my_rewards.py", "prompts.jsonl", "streamrl.toml"]
    mask = os.umask(0)
    os.umask(mask)
    mode = (task / "model" / "model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == 0o666 & ~mask, "another user, as in a container, may read it"
    (task / "my_rewards.py").unlink()
    assert write_example(task, "tiny", print, if_missing=True) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("mine")
    with pytest.raises(UserError, match=r"my_rewards\.py, which exists already"):
        write_example(tmp_path, "math", print)
    assert [path.name for path in tmp_path.iterdir()] == ["my_rewards.py"]
    assert (tmp_path / "my_rewards.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["math", "tiny"])
def test_the_example_rewards_score_texts_and_chats(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"rewards_of_{name}"
    (tmp_path / f"{module}.py").write_text(example(name, "x").rewards)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    if name == "tiny":
        completions = ["364", " 50*7=350 2*7=14 350+14=334", "3640", "x"]
        digits_right = load_function(f"{module}:digits_right")
        assert digits_right(completions=completions, answer=["364"] * 4) == [1.0, 2 / 3, 0.0, 0.0]
    else:
        chat = [{"role": "assistant", "content": "a" * 500}]
        assert load_function(f"{module}:brief")(completions=[chat, ""]) == [0.5, 1.0]


def test_the_examples_of_the_math_task_are_right() -> None:
    import json
    import re

    for line in example("math", "x").prompts.splitlines():
        row = json.loads(line)
        boxes, apples, eaten = map(int, re.findall(r"\d+", row["prompt"]))
        assert int(row["answer"]) == boxes * apples - eaten > 0


@pytest.mark.parametrize(("name", "plain"), [("My Task!", "my-task"), ("a.b_c", "a.b_c"), ("Ü", "my-run")])
def test_a_run_is_called_after_the_directory(tmp_path: Path, name: str, plain: str) -> None:
    assert plain_run_name(tmp_path / name) == plain
