"""An expected answer is read whole or refused: a corpus of golds, and numbers in any form."""

from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamrl.producers.rewards import mathematics
from streamrl.producers.rewards.builtin import math_verify
from streamrl.producers.rewards.mathematics import AnswerRefused, expected, found_in, is_equal
from tests.producers.rewards.builtin.golds import BY_HAND, DECOYS, LONG, REFUSED, read_golds

score = cache(math_verify)


def paid(completion: str, gold: Any) -> Any:
    (reward,) = score()(completions=[completion], answer=[gold])
    return reward


GOLDS = read_golds()
AT_ONCE = 10


def test_the_corpus_is_large_and_names_no_gold_twice() -> None:
    assert len(GOLDS) == len(set(GOLDS)) >= 300


@pytest.mark.parametrize("start", range(0, len(GOLDS), AT_ONCE))
def test_an_expected_answer_is_read_whole_or_refused(start: int) -> None:
    """Each gold of the corpus earns 1 for its own text, also in a box, and 0 for the text of another."""
    for place, gold in enumerate(GOLDS[start : start + AT_ONCE], start):
        boxed = gold if gold in LONG or "boxed" in gold else f"So it is $\\boxed{{{gold}}}$."
        assert (paid(gold, gold), paid(boxed, gold)) == (1.0, 1.0), gold
        other = GOLDS[(place + 101) % len(GOLDS)]
        assert paid(other, gold) == 0.0, (gold, other)


@pytest.mark.parametrize("form", BY_HAND)
def test_an_answer_is_read_alike_in_a_box_and_alone(form: str) -> None:
    """Without the rule that equal texts are equal answers."""
    unlike = []
    for gold in BY_HAND[form].split("|"):
        wanted = expected(gold)
        for completion in (gold, f"I think \\boxed{{{gold}}}"):
            if not any(is_equal(wanted, one) for one in found_in(completion)):
                unlike.append(completion)
    assert not unlike


@pytest.mark.parametrize("gold", REFUSED)
def test_an_answer_that_is_no_mathematics_is_refused_and_quoted(gold: str) -> None:
    with pytest.raises(AnswerRefused, match=r"expected mathematics as answer for math_verify, got ['\"]") as refusal:
        paid(gold, gold)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(("gold", "other"), DECOYS)
def test_a_part_of_an_answer_is_another_answer(gold: str, other: str) -> None:
    assert paid(gold, gold) == 1.0
    assert paid(other, gold) == 0.0
    assert paid(f"so \\boxed{{{other}}}", gold) == 0.0


NUMBERS = st.integers(-(10**9), 10**9)
INTEGER_FORMS = (
    "{0}",
    "{0:,}",
    "\\boxed{{{0}}}",
    "${0}$",
    "So I get {0}.",
    "#### {0}",
    "The answer is \\boxed{{{0:,}}}",
    "{0}.0",
)
FRACTION_FORMS = ("{0}/{1}", "\\frac{{{0}}}{{{1}}}", "$\\dfrac{{{0}}}{{{1}}}$", "\\boxed{{\\frac{{{0}}}{{{1}}}}}")
FORMULAS = ("{}x+{}", "({}, {})", "{}+{}i", "\\{{{}, {}\\}}", "[{}, {})", "{}, {}", "y = {}x+{}", "{}\\sqrt{{{}}}")
FORMULA_FORMS = ("{}", "\\boxed{{{}}}", "${}$", "\\({}\\)")


@settings(max_examples=60, deadline=None)
@given(NUMBERS, NUMBERS, st.sampled_from(INTEGER_FORMS), st.sampled_from(INTEGER_FORMS[:4]))
def test_an_integer_is_itself_in_any_form(one: int, other: int, said: str, wanted: str) -> None:
    assert paid(said.format(one), wanted.format(one)) == 1.0
    assert paid(said.format(other), wanted.format(one)) == float(one == other)


@settings(max_examples=40, deadline=None)
@given(
    st.fractions(-100, 100, max_denominator=99),
    st.fractions(-100, 100, max_denominator=99),
    st.sampled_from(FRACTION_FORMS),
    st.sampled_from(FRACTION_FORMS),
)
def test_a_fraction_is_itself_in_any_form(one: Fraction, other: Fraction, said: str, wanted: str) -> None:
    gold = wanted.format(*one.as_integer_ratio())
    assert paid(said.format(*one.as_integer_ratio()), gold) == 1.0
    assert paid(said.format(*other.as_integer_ratio()), gold) == float(one == other)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(FORMULAS),
    st.lists(st.integers(2, 99), min_size=4, max_size=4, unique=True),
    st.sampled_from(FORMULA_FORMS),
)
def test_a_formula_is_no_part_of_it_and_no_other_of_its_form(form: str, numbers: list[int], said: str) -> None:
    first, second, *others = sorted(numbers)
    assume("sqrt" not in form or first**2 != second)  # 2 times the root of 4 is 4, and so a part of it
    gold = form.format(first, second)
    assert paid(said.format(gold), gold) == 1.0
    for part in (first, second, form.format(*others)):
        assert paid(said.format(part), gold) == 0.0
        assert paid(said.format(gold), str(part)) == 0.0


def test_a_time_out_is_no_verdict() -> None:
    with pytest.raises(TimeoutError, match="math_verify took more than 3 s to compare a completion with '5'"):
        paid("$9^{9^{9^9}}$", "5")


def test_the_reward_is_made_on_a_machine_that_is_too_busy_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> bool:
        raise TimeoutError("math_verify took more than 3 s")

    monkeypatch.setattr(mathematics, "is_equal", late)
    score = math_verify()
    monkeypatch.undo()
    assert score(completions=["7"], answer=["7"]) == [1.0]


def test_answers_that_are_neither_text_nor_number_are_refused_by_name() -> None:
    for answer in ({"target": 24}, True, [["7"]], b"7"):
        with pytest.raises(ValueError, match=r"expected text, a number or a list of these as answer, got"):
            paid("7", answer)
    assert paid("7", [None, " "]) is None
