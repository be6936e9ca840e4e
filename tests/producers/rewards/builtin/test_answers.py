import pytest

from streamrl.producers.rewards.answers import answer_in
from streamrl.producers.rewards.builtin import THINK_ANSWER, exact_match, matches_format

TAGGED = r"<answer>(.*?)</answer>"


def test_the_last_match_holds_the_answer() -> None:
    assert answer_in("<answer>1</answer> no, <answer>\n2</answer>", TAGGED) == "\n2"
    assert answer_in("#### 7", r"#### \d+") == "#### 7"
    assert answer_in("nothing", TAGGED) is None
    assert answer_in("all of it", None) == "all of it"


def test_an_exact_match_forgives_white_space_around_the_answer_only() -> None:
    score = exact_match()
    assert score(completions=["42 ", "4 2", "43"], answer=["42", "42", "42"]) == [1.0, 0.0, 0.0]
    assert score(completions=["7"], answer=[7]) == [1.0]


def test_any_of_several_accepted_answers_counts_and_none_means_not_applicable() -> None:
    assert exact_match()(completions=["b", "c"], answer=[["a", "b"], None]) == [1.0, None]


def test_a_pattern_finds_the_answer_in_a_conversational_completion() -> None:
    said = [[{"role": "assistant", "content": "<answer> 42 </answer>"}], [{"role": "assistant", "content": "42"}]]
    assert exact_match(TAGGED)(completions=said, answer=["42", "42"]) == [1.0, 0.0]


def test_a_missing_column_of_answers_says_which_setting_to_change() -> None:
    with pytest.raises(ValueError, match=r"set data\.answer_column"):
        exact_match()(completions=["x"])


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("<think></think><answer></answer>\n", 1.0),
        ("<think>a</think>", 0.0),
        ("x <think>a</think><answer>c</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
    ],
)
def test_think_and_answer_tags_are_wanted_once_and_in_order(text: str, reward: float) -> None:
    assert matches_format(THINK_ANSWER)(completions=[text]) == [reward]


def test_the_format_is_whatever_pattern_is_set() -> None:
    assert matches_format(r"[a-z]+")(completions=["abc", "abc1"]) == [1.0, 0.0]
