import datetime
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from streamrl.producers.prompts.columns import column_map
from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.errors import DataError

TURNS = [{"role": "user", "content": "1+1?"}]
VERL = {
    "data_source": "mine",
    "prompt": TURNS,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


def split(row: dict[str, Any], rewards: Sequence[str] = (), **settings: Any) -> tuple[Any, dict[str, Any]]:
    columns = column_map(DataSettings.model_validate({"path": "x", **settings}), rewards)
    return columns.split_row(row, "x.jsonl, line 1")


def test_trl_rows_need_no_mapping_and_no_answer() -> None:
    assert split({"prompt": "p", "answer": "a", "solution": "s"}) == ("p", {"answer": "a", "solution": "s"})
    assert split({"prompt": "p"}) == ("p", {})


def test_verls_ground_truth_is_the_answer_and_its_other_columns_stay() -> None:
    prompt, columns = split(VERL, format="verl")
    assert prompt == TURNS
    assert columns == {key: VERL[key] for key in VERL if key != "prompt"} | {"answer": "2"}


def test_openrlhfs_input_and_label_are_prompt_and_answer() -> None:
    assert split({"input": "p", "label": "a"}, format="openrlhf") == ("p", {"answer": "a"})
    assert split({"input": "p"}, format="openrlhf") == ("p", {})


def test_named_columns_replace_the_formats_and_may_be_dotted() -> None:
    row = {"task": {"question": "q", "level": 1}, "gold": 3}
    assert split(row, prompt_column="task.question", answer_column="gold") == (
        "q",
        {"task": {"question": "q", "level": 1}, "answer": 3},
    )
    assert split({"a.b": "p"}, prompt_column="a.b") == ("p", {})


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"question": "q"}, {}, r"a prompt in column 'prompt' of x.jsonl, line 1.*\['question'\]; set data.prompt_col"),
        ({"prompt": "p"}, {"answer_column": "gold"}, "an answer in column 'gold'.*set data.answer_column"),
        ({"prompt": "p"}, {"format": "verl"}, "an answer in column 'reward_model.ground_truth'"),
        ({"prompt": None}, {}, "got nothing"),
        ({"prompt": ["x"]}, {}, "got str as turn 1"),
    ],
)
def test_a_row_that_does_not_fit_says_what_was_expected(
    row: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        split(row, **settings)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "trainer_state", "log_metric"])
def test_a_column_with_the_name_of_a_reward_functions_argument_is_refused(name: str) -> None:
    row = {"prompt": "p", name: "x"}
    with pytest.raises(DataError, match=f"x.jsonl, line 1, got '{name}'; rename the column"):
        split(row, ("rewards:mine",))
    assert split(row, ("exact_match",)) == ("p", {name: "x"})
    assert split({name: "p"}, ("rewards:mine",), prompt_column=name) == ("p", {})


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (84.0, "a float: 84.0"),
        (True, "a bool: True"),
        (b"84", "a bytes: b'84'"),
        (Decimal("84.00"), "a Decimal: 84.00"),
        (datetime.date(1969, 7, 20), "a date: 1969-07-20"),
    ],
)
def test_answers_keep_their_written_form_or_are_named_by_row_and_type(answer: Any, got: str) -> None:
    message = f"expected text as answer .column 'answer'. of x.jsonl, line 1, got {got}; give it as text"
    for rewards in ((), ("exact_match",)):
        with pytest.raises(DataError, match=message):
            split({"prompt": "p", "answer": answer}, rewards)
    with pytest.raises(DataError, match=got):
        split({"prompt": "p", "answer": ["7", answer]}, ("exact_match",))


@pytest.mark.parametrize("answer", ["84", "", 84, 10**30, None, ["1", "2"], ["1", 2, None]])
@pytest.mark.parametrize("rewards", [(), ("math_verify",), ("exact_match", "mine:own")])
def test_texts_integers_and_lists_of_them_are_answers_as_they_are(answer: Any, rewards: tuple[str, ...]) -> None:
    assert split({"prompt": "p", "answer": answer}, rewards) == ("p", {"answer": answer})


COUNTDOWN = {"prompt": TURNS, "reward_model": {"ground_truth": {"target": 24, "numbers": [1, 2], "more": None}}}


def test_a_mapping_is_an_answer_for_own_rewards_and_refused_where_a_built_in_one_would_compare_it() -> None:
    expected = {"target": 24, "numbers": [1, 2]}
    assert split(COUNTDOWN, ("mine:countdown", "format"), format="verl")[1]["answer"] == expected
    for name in ("math_verify", "exact_match"):
        with pytest.raises(DataError, match=f"{name} compares.*a mapping of target, numbers.*'reward_model.ground_tru"):
            split(COUNTDOWN, ("format", name), format="verl")
    path = "reward_model.ground_truth.target"
    assert split(COUNTDOWN, ("math_verify",), format="verl", answer_column=path)[1]["answer"] == 24


@pytest.mark.parametrize("answer", [[], [["1"]], [{"target": 1}]])
def test_lists_that_no_text_can_equal_are_refused_for_built_in_rewards(answer: list[Any]) -> None:
    with pytest.raises(DataError, match=r"exact_match compares.*score with a function of your own"):
        split({"prompt": "p", "answer": answer}, ("exact_match",))


def test_a_nested_column_is_found_in_json_text() -> None:
    row = {"prompt": "p", "reward_model": '{"style": "rule", "ground_truth": "007"}'}
    assert split(row, format="verl")[1]["answer"] == "007"
