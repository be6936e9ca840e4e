from typing import Any

import pytest

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.tables import column_map
from streamrl.schemas.errors import DataError

TURNS = [{"role": "user", "content": "1+1?"}]
VERL = {
    "data_source": "mine",
    "prompt": TURNS,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


def split(row: dict[str, Any], **settings: Any) -> tuple[Any, dict[str, Any]]:
    return column_map(DataSettings.model_validate({"path": "x", **settings})).split_row(row, "x.jsonl, line 1")


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
