import json
import math
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from streamrl.demo.task import (
    ANSWER_PATTERN,
    BUCKET_BOUNDARIES,
    MARKS,
    MAX_COMPLETION_TOKENS,
    MAX_PROMPT_TOKENS,
    Question,
    held_out_questions,
    style_of,
    training_prompts,
    training_questions,
)
from streamrl.demo.warm_start import lessons
from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import open_source
from streamrl.producers.rewards.builtin import exact_match


def content_of(text: str) -> tuple[str, ...]:
    """Operator and sorted numbers of a question's text, read off by other means than the task's."""
    return ("*" if "*" in text else "+", *sorted(re.findall(r"\d+", text)))


def value_of(expression: str) -> int:
    return math.prod(map(int, expression.split("*"))) if "*" in expression else sum(map(int, expression.split("+")))


def test_no_held_out_question_is_ever_trained_on(tmp_path: Path) -> None:
    held_out = {content_of(question.text) for question in held_out_questions(seed=0, count=512)}
    assert len(held_out) == 512
    warm = {content_of(text) for text, _ in islice(lessons("lessons/0", 0.5), 20_000)}
    assert not held_out & warm

    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in training_prompts(0, 4000)))
    source = open_source(DataSettings(path=str(path)), run_seed=0)
    trained = {content_of(source.prompt_at(position)[0].text) for position in range(4000)}
    assert not held_out & trained


def test_a_question_is_on_one_side_whatever_the_order_of_its_numbers() -> None:
    assert Question("+", (12, 34, 56)).content == Question("+", (56, 12, 34)).content
    assert Question("+", (12, 34)).content != Question("*", (12, 34)).content
    drawn = [question for question in islice(training_questions(3), 2000) if question.operator == "+"]
    assert not any(Question("+", question.numbers[::-1]).is_held_out for question in drawn)


def test_one_question_in_five_is_held_out() -> None:
    held_out = sum(Question("+", (a, b, 50)).is_held_out for a in range(11, 100) for b in range(a, 100))
    assert held_out / (89 * 90 / 2) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("question", "worked"),
    [
        (Question("*", (52, 7)), " 50*7=350 2*7=14 350+14=364"),
        (Question("+", (82, 20, 58)), " 80+20+50=150 2+0+8=10 150+10=160"),
    ],
)
def test_a_worked_solution_adds_tens_and_units(question: Question, worked: str) -> None:
    assert question.worked(" ") == worked


def test_every_step_that_is_taught_is_right_and_every_solution_ends_with_the_answer() -> None:
    styles: Counter[str] = Counter()
    for text, solution in islice(lessons(0, 0.5), 3000):
        styles[style_of(solution)] += 1
        expected = str(value_of(text.removesuffix("=")))
        assert exact_match(ANSWER_PATTERN)([solution], answer=[expected]) == [1.0]
        for step in re.split("[" + "".join(MARKS) + "]", solution)[1:]:
            left, right = step.split("=")
            assert value_of(left) == int(right)
    assert styles["bare"] == pytest.approx(1500, abs=120)


def test_lengths_fit_the_limits_and_each_kind_of_solution_has_a_bucket() -> None:
    bare, product, three = BUCKET_BOUNDARIES
    for question in islice(training_questions(0), 3000):
        worked = len(question.worked(" ")) + 1
        assert len(question.text) <= MAX_PROMPT_TOKENS
        assert len(question.answer) + 1 <= bare < worked < MAX_COMPLETION_TOKENS
        bucket = (worked > product) + (worked > three)
        # The shortest sum of four is as long as the longest of three.
        assert bucket == (0 if question.operator == "*" else len(question.numbers) - 2) or worked == three


def test_held_out_questions_repeat_for_a_seed() -> None:
    first, again, other = (held_out_questions(seed=seed, count=100) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_only_the_last_number_is_judged() -> None:
    completions = ["364", " 50*7=350 2*7=14 350+14=364", "\n50*7=1\n364", "364 ", "364=", "36", " 364 365", ""]
    rewards = exact_match(ANSWER_PATTERN)(completions, answer=["364"] * len(completions))
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
