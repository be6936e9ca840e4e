"""What makes a run pointless is found before it begins, and what harms a part of it is told."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.local.task_check import check_task, checked, require_readable
from schemas.errors import ModelError, RewardLoadError, UserError
from settings.loading import validated
from settings.tree import Settings
from tests.pipeline.tiny_model import save_tiny_model

REWARDS = """
def length(completions, **columns):
    return [float(len(completions[0]))]

def never(completions, **columns):
    print("a line of the user's own")
    raise KeyError("answer")

def seldom(completions, **columns):
    return [1.0 / len(completions[0])]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def task(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings for these prompts and this reward; the model takes 128 tokens, of which one is the completion's."""
    (tmp_path / "own_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    def settings(prompts: Sequence[Any], reward: str = "length", path: Path = model) -> Settings:
        (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        tree = {"model": {"path": str(path)}, "data": {"path": "p.jsonl"}}
        return validated(tree | {"rewards": {"functions": [f"own_reward:{reward}"]}})

    return settings


def test_a_file_that_may_not_be_read_is_named_with_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(b"")
    weights.chmod(0o600)
    require_readable(model, "model.path")
    require_readable(tmp_path / "none", "model.path")
    # Root, as which tests may run, may read everything.
    monkeypatch.setattr(os, "access", lambda path, _mode: path != weights)
    with pytest.raises(UserError, match=rf"may read \(uid \d+\), got {weights} with mode 0600 of uid") as told:
        require_readable(model, "model.path")
    assert str(told.value).endswith(f"chmod -R a+rX {model}")


def test_a_mixture_with_too_long_prompts_goes_on_with_a_warning(task: Any) -> None:
    (warning,) = checked(task(["x" * 127, "x" * 128, "short", "x" * 300]))
    assert warning.startswith("2 of 4 prompts will be refused and skipped: 2 longer than 127 tokens; p/")
    assert checked(task(["x" * 127, "short"])) == []


def test_prompts_of_which_hardly_any_can_be_sampled_are_refused_with_one_of_them(task: Any) -> None:
    with pytest.raises(ModelError, match=r"3 of 3 prompts that would be refused: 3 longer than 127 tokens; p/.*128"):
        checked(task(["x" * 128] * 3))
    with pytest.raises(ModelError, match=r"19 of 20 prompts that would be refused"):
        checked(task(["x" * 128] * 19 + ["short"]))
    with pytest.raises(ModelError, match="2 no chat template; p/"):
        checked(task([[{"role": "user", "content": "hi"}]] * 2))


def test_a_reward_that_scores_nothing_is_refused_and_one_that_sometimes_fails_is_not(task: Any) -> None:
    with pytest.raises(RewardLoadError, match=r"reward never to score.* each of 4, .*: p/\d: KeyError: 'answer'"):
        checked(task(["a", "b"], "never"))
    assert checked(task(["a", "b"], "seldom")) == []  # on completions of no characters


def test_the_check_runs_in_a_process_of_its_own_and_its_refusal_is_one_line(
    task: Any, tmp_path: Path, model: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / file).write_bytes((model / file).read_bytes())
    with pytest.raises(UserError, match=r"expected a tokenizer at .*bare, got a model without one") as refusal:
        check_task(task(["a"], path=bare))
    assert "\n" not in str(refusal.value)


def test_an_algorithm_of_the_users_own_that_is_not_there_is_told_before_the_start(task: Any) -> None:
    settings = task(["short"])
    own = settings.algorithm.model_copy(update={"name": "own_reward:Algorithm"})
    with pytest.raises(UserError, match="expected a function 'Algorithm' in own_reward, got none"):
        checked(settings.model_copy(update={"algorithm": own}))
