"""The tasks as every contender gets them."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.task import read_entries, write_entries
from benchmarks.peers.tasks import SHOWN, TASKS, is_held_out, named, training_entries, verified
from streamrl.demo.task import Question


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


def test_names_count_between_tags_and_in_chat_turns_alike() -> None:
    texts = [
        "Ann bears it. <answer>Ann</answer>",
        "<answer>Bo</answer> <answer> Ann </answer>",
        "Ann",
        "<answer>Ann</answer>.",
        "<answer>Ann Bo</answer>",
        "<answer>Ann-Bo</answer>",
    ]
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    answers = [*["Ann"] * 5, "Ann-Bo"]
    assert named(texts, answer=answers) == named(turns, answer=answers) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_smollm2_is_shown_two_solved_questions_and_asked_about_nobody_whom_it_is_judged_on() -> None:
    task = TASKS["smollm2"]
    prompts = training_entries(task, task.hyperparameters, seed=0)
    held_out = task.held_out_entries(0, 256)
    assert len(prompts) == 2 * task.hyperparameters.groups_per_step * task.hyperparameters.max_steps
    assert all(row["answer"] in row["prompt"][-1]["content"] for row in [*prompts, *held_out])
    assert all(is_held_out(row["answer"]) for row in held_out)
    about = [row["prompt"][-1]["content"].partition(".\n")[0].split(". ") for row in prompts]
    assert not any(is_held_out(statement.split()[0]) for statements in about for statement in statements)
    assert not any(is_held_out(statement.split()[0]) for *statements, _ in SHOWN for statement in statements)
    assert len({row["prompt"][-1]["content"] for row in held_out}) == 256
    assert {len(row["prompt"]) for row in [*prompts, *held_out]} == {1 + 2 * 2 + 1}
    assert {row["part"] for row in held_out} == {"first statement", "second statement"}
    assert prompts[0] != training_entries(task, task.hyperparameters, seed=1)[0]


@pytest.mark.processes
def test_it_needs_no_library_so_that_every_environment_loads_it() -> None:
    script = "import sys, benchmarks.peers.task; print(sorted({'pydantic', 'torch', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
