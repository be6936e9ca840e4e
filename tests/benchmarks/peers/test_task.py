"""The demo's task as every contender gets it."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.task import read_entries, verified, write_held_out, write_training
from streamrl.demo.task import Question


def content(text: str) -> str:
    operator = "*" if "*" in text else "+"
    return Question(operator, tuple(map(int, text.rstrip("=").split(operator)))).content  # type: ignore[arg-type]


def test_no_held_out_question_is_among_the_prompts_in_whatever_order_its_numbers_stand(tmp_path: Path) -> None:
    write_training(tmp_path / "prompts.jsonl", 3000, seed=0)
    write_held_out(tmp_path / "held_out.jsonl", 400, seed=0)
    prompts, held_out = (read_entries(tmp_path / f"{name}.jsonl") for name in ("prompts", "held_out"))
    trained = {content(row["prompt"]) for row in prompts}
    asked = [content(row["prompt"]) for row in held_out]
    assert len(prompts) == 3000
    assert len(set(asked)) == len(asked) == 400
    assert not trained & set(asked)
    assert {row["part"] for row in held_out} == {"product", "sum"}


def test_only_the_last_number_is_judged() -> None:
    texts = ["364", " 50*7=350 2*7=14 350+14=364", "364 or so", "3640", ""]
    assert verified(texts, answer=["364"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.processes
def test_it_needs_no_library_so_that_every_environment_loads_it() -> None:
    script = "import sys, benchmarks.peers.task; print(sorted({'pydantic', 'torch', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
