"""The tasks as every contender gets them."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.task import read_entries, write_entries
from benchmarks.peers.tasks import TASKS, tagged, training_entries, verified
from streamrl.demo.task import Question
from streamrl.init import smollm2


def content(text: str) -> str:
    operator = "*" if "*" in text else "+"
    return Question(operator, tuple(map(int, text.rstrip("=").split(operator)))).content  # type: ignore[arg-type]


def test_no_held_out_question_is_among_the_prompts_in_whatever_order_its_numbers_stand(tmp_path: Path) -> None:
    demo = TASKS["demo"]
    write_entries(tmp_path / "prompts.jsonl", demo.training(0, 3000))
    prompts, held_out = read_entries(tmp_path / "prompts.jsonl"), demo.held_out_entries(0, 400)
    trained = {content(row["prompt"]) for row in prompts}
    asked = [content(row["prompt"]) for row in held_out]
    assert len(prompts) == 3000
    assert len(set(asked)) == len(asked) == 400
    assert not trained & set(asked)
    assert {row["part"] for row in held_out} == {"product", "sum"}


def test_only_the_last_number_is_judged() -> None:
    texts = ["364", " 50*7=350 2*7=14 350+14=364", "364 or so", "3640", ""]
    assert verified(texts, answer=["364"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_answers_count_between_tags_and_in_chat_turns_alike() -> None:
    texts = ["2 + 2 = 4\n<answer>4</answer>", "<answer>5</answer> <answer> 4 </answer>", "4", "<answer>4</answer>5"]
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    assert tagged(texts, answer=["4"] * 4) == tagged(turns, answer=["4"] * 4) == [1.0, 1.0, 0.0, 1.0]


def test_smollm2_is_shown_three_solved_sums_and_asked_nothing_that_it_is_judged_on() -> None:
    task = TASKS["smollm2"]
    prompts = training_entries(task, task.hyperparameters, seed=0)
    held_out = task.held_out_entries(0, 64)
    assert len(prompts) == 4096
    asked = {smollm2.content_of(smollm2.question_of(row)) for row in prompts}
    assert not asked & {smollm2.content_of(smollm2.question_of(row)) for row in held_out}
    assert {len(row["prompt"]) for row in [*prompts, *held_out]} == {1 + 3 * 2 + 1}
    assert {row["part"] for row in held_out} == {"2 terms", "3 terms"}


@pytest.mark.processes
def test_it_needs_no_library_so_that_every_environment_loads_it() -> None:
    script = "import sys, benchmarks.peers.task; print(sorted({'pydantic', 'torch', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
