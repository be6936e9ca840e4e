import enum
from typing import Any

import numpy as np
import pytest

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import json_safe, make_prompt, scoring_entry
from streamrl.schemas.errors import DataError
from streamrl.schemas.trajectories import ChatTurn, Prompt


def _prompt(content: Any, columns: dict[str, Any] | None = None, **settings: Any) -> Prompt:
    chosen = DataSettings.model_validate({"dataset": "gcd", **settings})
    return make_prompt(chosen, dataset="gcd", index=7, content=content, columns=columns or {})


def test_text_stays_text_inside_its_template() -> None:
    prompt = _prompt("2 + {x}", prompt_template="Q: {prompt}\nJSON: {}")
    assert prompt.content == "Q: 2 + {x}\nJSON: {}"
    assert prompt.prompt_id == "gcd/7"


def test_a_system_prompt_makes_a_chat() -> None:
    assert _prompt("hi", system_prompt="Be brief.").content == (
        ChatTurn(role="system", content="Be brief."),
        ChatTurn(role="user", content="hi"),
    )


def test_a_conversational_prompt_is_one_user_turn() -> None:
    assert _prompt("hi", conversational=True).content == (ChatTurn(role="user", content="hi"),)


def test_chat_turns_keep_their_own_system_turn() -> None:
    turns = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert [turn.content for turn in _prompt(turns, system_prompt="ours").content] == ["own", "hi"]  # type: ignore[union-attr]


@pytest.mark.parametrize("content", [[], 3, [{"role": "user"}], "\ud800", "x" * (1 << 20 | 1)])
def test_a_prompt_that_cannot_be_sent_is_refused_with_its_name(content: Any) -> None:
    with pytest.raises(DataError, match="gcd/7"):
        _prompt(content)


def test_columns_that_are_too_large_are_refused() -> None:
    with pytest.raises(DataError, match="at most 2097152 bytes"):
        _prompt("hi", {"answer": "x" * (3 << 20)})


def test_values_become_what_json_can_say() -> None:
    class Colour(enum.Enum):
        RED = "red"

    value = {1: (1, 2), "s": {"b", "a"}, "n": np.int64(3), "a": np.arange(2), "t": np.str_("x"), "c": Colour.RED}
    assert json_safe(value) == {"1": [1, 2], "s": ["a", "b"], "n": 3, "a": [0, 1], "t": "x", "c": "red"}
    assert json_safe(float("nan")) == "nan"
    assert json_safe(2**70) == str(2**70)
    assert type(json_safe(np.float64(1.5))) is float
    assert json_safe(True) is True


def test_grids_become_tuples_again_where_the_scorer_compares_tuples() -> None:
    columns = {"answer": "1", "metadata": {"source_dataset": "rearc", "output": [[1]], "input": [[2]]}}
    assert scoring_entry(columns)["metadata"]["output"] == ((1,),)
    columns = {"answer": "1", "metadata": {"source_dataset": "gcd", "output": [[1]]}}
    assert scoring_entry(columns)["metadata"]["output"] == [[1]]
