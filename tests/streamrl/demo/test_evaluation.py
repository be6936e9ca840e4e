import pytest

from streamrl.demo.evaluation import Solution, metrics_of
from streamrl.demo.task import style_of


def solved(completion: str, *, correct: bool) -> Solution:
    return Solution("1+2=", completion, "3", style_of(completion), correct, len(completion) + 1)


def test_metrics_tell_styles_apart_and_count_a_question_once_for_pass_at_n() -> None:
    rounds = [
        [solved("3", correct=True), solved(" 1+2=4", correct=False), solved("4", correct=False)],
        [solved("4", correct=False), solved(" 1+2=3", correct=True), solved("5", correct=False)],
    ]
    told = metrics_of([solved("3", correct=True), solved(" 1+2=3", correct=True)], rounds)
    assert told == pytest.approx(
        {
            "accuracy": 1.0,
            "sampled_accuracy": 2 / 6,
            "pass_at_2": 2 / 3,
            "share_worked": 2 / 6,
            "greedy_share_worked": 1 / 2,
            "mean_length": (4 * 2 + 2 * 7) / 6,
            "accuracy_bare": 1 / 4,
            "accuracy_worked": 1 / 2,
        },
        abs=1e-4,
    )


def test_a_style_that_nothing_had_has_no_accuracy() -> None:
    told = metrics_of([solved("3", correct=True)], [[solved("3", correct=True)]])
    assert "accuracy_worked" not in told
    assert told["share_worked"] == 0.0
