import enum
import json
from typing import Any

import numpy as np
import pytest

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import UnsendablePrompt, json_safe, make_prompt, scoring_entry
from streamrl.schemas.codec import decode, encode, headers_of
from streamrl.schemas.errors import DataError
from streamrl.schemas.trajectories import ChatTurn, Prompt
from tests.schemas.examples import work_order


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


def test_a_setting_that_a_conversation_makes_meaningless_is_refused_by_name() -> None:
    turns = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert [turn.content for turn in _prompt(turns).content] == ["own", "hi"]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"without a system turn at gcd/7, because data\.system_prompt"):
        _prompt(turns, system_prompt="ours")
    with pytest.raises(DataError, match=r"a text as prompt at gcd/7, because data\.prompt_template"):
        _prompt(turns, prompt_template="Q: {prompt}")


def test_the_prompt_of_the_data_is_kept_if_the_settings_change_its_wording() -> None:
    user = ChatTurn(role="user", content="hi")
    assert _prompt("hi").stated is None
    assert _prompt("hi", prompt_template="Q: {prompt}").stated == "hi"
    assert _prompt("hi", conversational=True).stated is None
    assert _prompt("hi", system_prompt="Be brief.", prompt_template="Q: {prompt}").stated == (user,)
    assert _prompt([{"role": "user", "content": "hi"}], system_prompt="Be brief.").stated == (user,)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "string", "default": None}}}}]
KEPT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "string"}}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_of_a_row_are_described_to_the_model(tools: Any) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert _prompt(chat, {"tools": tools}).tools == KEPT_TOOLS
    assert _prompt("hi", {"tools": tools}, conversational=True).tools == KEPT_TOOLS
    with pytest.raises(DataError, match=r"gcd/7, because its column 'tools'.*data\.conversational"):
        _prompt("hi", {"tools": tools})
    with pytest.raises(DataError, match=r"gcd/7, because data\.chat_template_kwargs"):
        _prompt(chat, {"tools": tools}, chat_template_kwargs={"tools": []})


@pytest.mark.parametrize("tools", [["add"], {"name": "add"}, "add", 3])
def test_a_column_of_that_name_with_something_else_is_refused_in_a_chat_alone(tools: Any) -> None:
    with pytest.raises(DataError, match="a list of JSON schemas in column 'tools' of gcd/7"):
        _prompt([{"role": "user", "content": "hi"}], {"tools": tools})
    assert _prompt("hi", {"tools": tools}).columns == {"tools": tools}
    assert _prompt([{"role": "user", "content": "hi"}], {"tools": None}).tools == []


def test_variables_of_the_chat_template_in_a_row_are_refused_unless_they_are_those_of_the_run() -> None:
    chat, variables = [{"role": "user", "content": "hi"}], {"enable_thinking": False}
    with pytest.raises(DataError, match=r"no column 'chat_template_kwargs' at gcd/7.*got {'enable_thinking': False}"):
        _prompt(chat, {"chat_template_kwargs": {**variables, "level": None}})
    assert _prompt(chat, {"chat_template_kwargs": variables}, chat_template_kwargs=variables)
    assert _prompt(chat, {"chat_template_kwargs": None})


@pytest.mark.parametrize("content", [[], 3, [{"role": "user"}], "\ud800", "x" * (1 << 20 | 1)])
def test_a_prompt_that_cannot_be_sent_is_refused_with_its_name(content: Any) -> None:
    with pytest.raises(DataError, match="gcd/7"):
        _prompt(content)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"answer": "x" * (3 << 20)}, "at most 2097152 bytes"),
        ({"answer": [0] * 100_001}, "at most 100000 values"),
        ({"answer": "\ud800"}, r"in a column: .*half of a surrogate pair"),
        ({"answer": json.loads("[" * 300 + "]" * 300)}, "in columns"),
    ],
)
def test_columns_that_no_order_can_carry_are_refused(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsendablePrompt, match=f"gcd/7.*{reason}|{reason}.*gcd/7"):
        _prompt("hi", columns)


def test_the_largest_prompts_that_are_accepted_fit_into_an_order() -> None:
    for columns in ({"a": [0] * 99_900}, {"a": "x" * ((2 << 20) - 400)}, {"a": json.loads("[" * 250 + "]" * 250)}):
        order = work_order("").replace(prompt=_prompt("hi", columns), sample_indices=(*range(4096),))
        assert decode(encode(order), headers_of(order)) == order


def test_values_become_what_json_can_say() -> None:
    class Colour(enum.Enum):
        RED = "red"

    value = {1: (1, 2), "s": {"b", "a"}, "n": np.int64(3), "a": np.arange(2), "t": np.str_("x"), "c": Colour.RED}
    assert json_safe(value) == {"1": [1, 2], "s": ["a", "b"], "n": 3, "a": [0, 1], "t": "x", "c": "red"}
    assert json_safe(float("nan")) == "nan"
    assert json_safe(2**70) == str(2**70)
    assert type(json_safe(np.float64(1.5))) is float
    assert json_safe(True) is True
    assert json_safe({"b": b"\xff7"}) == {"b": "/zc="}


def test_grids_become_tuples_again_where_the_scorer_compares_tuples() -> None:
    columns = {"answer": "1", "metadata": {"source_dataset": "rearc", "output": [[1]], "input": [[2]]}}
    assert scoring_entry(columns)["metadata"]["output"] == ((1,),)
    columns = {"answer": "1", "metadata": {"source_dataset": "gcd", "output": [[1]]}}
    assert scoring_entry(columns)["metadata"]["output"] == [[1]]
