from pathlib import Path

import pytest

from producers.prompts.sources import open_source
from schemas.errors import UserError
from schemas.import_path import load_function
from settings.keys import known_keys
from settings.loading import load_settings
from settings.run_directory import plain_run_name
from streamrl.init.examples import as_commented_toml, example, write_example


def test_the_written_configuration_is_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, *_ = write_example(tmp_path / "My Task", "math", print)
    monkeypatch.chdir(config.parent)
    settings = load_settings(config, [])
    assert settings.run.name == "my-task"
    assert settings.model.path.startswith("Qwen/")
    prompt = open_source(settings.data).prompt_at(0)[0]
    assert not isinstance(prompt.content, str)
    assert set(prompt.columns) == {"answer"}


def test_what_is_commented_out_can_be_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the subset, which a single file has none of."""
    for name in ("math", "tiny"):
        made = example(name, "x")  # type: ignore[arg-type]
        assert {entry.key for entry in made.entries} <= set(known_keys())
        text = as_commented_toml(made.head, made.entries)
        active = "\n".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines())
        path = tmp_path / f"{name}.toml"
        path.write_text(active.replace("# data", "data"))
        load_settings(path, [])


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("mine")
    with pytest.raises(UserError, match=r"my_rewards\.py, which is there already"):
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
