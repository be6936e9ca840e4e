"""What a run depends on besides its settings, and what says what its trajectories mean."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.deploy.local import inputs
from streamrl.deploy.local.inputs import SETTINGS, inputs_of, task_of
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with prompts, a reward and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "house.py").write_text("def score(completions, **columns):\n    return [0.0]\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def settings_of(**sections: Any) -> Settings:
    tree: dict[str, Any] = {
        "data": {"path": "train.jsonl"},
        "model": {"path": "model"},
        "rewards": {"functions": ["house:score", "exact_match"]},
    }
    return validated({name: tree.get(name, {}) | sections.get(name, {}) for name in tree | sections})


def known(settings: Settings) -> dict[str, str | None]:
    return {each.name: each.fingerprint for each in inputs_of(settings)}


def task(**sections: Any) -> dict[str, str]:
    settings = settings_of(**sections)
    return task_of(settings, inputs_of(settings))


def test_prompts_rewards_and_model_are_inputs() -> None:
    found = known(settings_of())
    assert set(found) == {"prompts", "reward house:score", "reward exact_match", "model"}
    assert all(found.values())
    assert (found["reward exact_match"] or "").startswith("streamrl ")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("prompts", "train.jsonl"),
        ("reward house:score", "house.py"),
        ("model", "model/config.json"),
        ("model", "model/model.safetensors"),
    ],
)
def test_a_changed_file_changes_its_input_and_no_other(name: str, file: str, files: Path) -> None:
    before = known(settings_of())
    with (files / file).open("a") as opened:
        opened.write(" ")
    after = known(settings_of())
    assert {each for each in after if after[each] != before[each]} == {name}


def test_functions_that_settings_name_are_inputs(files: Path) -> None:
    data = {"filter": "house:keeps"}
    found = known(settings_of(data=data, ingest={"sampling": "house:first"}, algorithm={"name": "house:Mine"}))
    assert {"prompt filter house:keeps", "code of house:first", "code of house:Mine"} <= set(found)


def test_an_emulated_run_has_neither_a_model_nor_rewards() -> None:
    emulated = settings_of(generation={"engine": "emulated"}, training={"backend": "emulated"})
    assert set(known(emulated)) == {"prompts"}


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"training": {"learning_rate": 1e-4, "max_steps": 7}}, set()),
        ({"rewards": {"weights": [2.0, 1.0]}}, set()),
        ({"run": {"seed": 7}}, set()),
        ({"algorithm": {"name": "house:Mine"}}, set()),
        ({"loop": {"temperature": 0.5}}, {SETTINGS}),
        ({"loop": {"stop": ["\n"]}}, {SETTINGS}),
        ({"data": {"system_prompt": "Think."}}, {SETTINGS}),
        ({"rewards": {"answer_pattern": "(.*)"}}, {SETTINGS}),
        ({"rewards": {"functions": ["exact_match"]}}, {SETTINGS}),
    ],
)
def test_only_what_says_what_a_trajectory_means_belongs_to_the_task(sections: dict[str, Any], parts: set[str]) -> None:
    before, after = task(), task(**sections)
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == parts


def test_prompts_rewards_and_model_belong_to_the_task(files: Path) -> None:
    before = task()
    assert set(before) == {SETTINGS, "prompts", "reward house:score", "reward exact_match", "model"}
    (files / "house.py").write_text("def score(completions, **columns):\n    return [1.0]\n")
    assert task() != before


def test_prompts_that_were_moved_are_the_same_task(files: Path) -> None:
    before = task()
    (files / "train.jsonl").rename(files / "moved.jsonl")
    assert task(data={"path": "moved.jsonl"}) == before


def test_the_seed_is_part_of_a_task_of_generated_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "prompts_fingerprint", lambda data: "reasoning-gym 1")
    first, second = (
        validated({"data": {"dataset": "chain_sum"}, "model": {"path": "model"}, "run": {"seed": seed}})
        for seed in (1, 2)
    )
    assert task_of(first, [])[SETTINGS] != task_of(second, [])[SETTINGS]
