"""A conversation is passed on whole, or refused by the name of the part that cannot be passed on."""

import json
from typing import Any

import pytest

from streamrl.producers.prompts.conversations import NotWhole, turns_in

USER = {"role": "user", "content": "12*7?"}
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"x": "12*7"}}}


def test_all_that_a_turn_has_is_kept() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {**USER, "name": "bob"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "easy"},
        {"role": "tool", "name": "calculator", "tool_call_id": "a1", "content": "84"},
        {"role": "assistant", "content": "Let me think: <answer>"},
    ]
    assert turns_in(turns) == turns


def test_keys_without_a_value_are_as_if_missing() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "1", "y": None}}, "id": None}
    stored = [
        {"role": "user", "content": "hi", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ]
    assert turns_in(stored) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "1"}}}]},
        {"role": "assistant", "content": "x"},
    ]


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "3+4"}, {"type": "text", "text": "?", "image": None}]
    assert turns_in([{"role": "user", "content": parts}]) == [{"role": "user", "content": "3+4?"}]


def test_turns_as_json_text_are_turns_and_any_other_text_is_text() -> None:
    assert turns_in(json.dumps([USER])) == [USER]
    assert turns_in(f"\n {json.dumps([USER], indent=2)}") == [USER]
    assert turns_in(json.dumps([{"name": "bob", **USER}])) == [{"name": "bob", **USER}]
    for text in ("[{]", '[{"a": 1}]', "[1, 2]", '{"role": "user"}', '"[]"', "[{x}]"):
        assert turns_in(text) == text


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (str([USER]), "not JSON"),
        (str([{"name": "bob", **USER}]), "not JSON"),
        (str(USER), "not JSON"),
        (None, "nothing"),
        (USER, "dict"),
        (json.dumps(USER), "dict"),
        (json.dumps({"messages": [USER]}), "dict"),
        (json.dumps([{"from": "human", "value": "hi"}]), "turn 1 without text as role and content"),
        *(
            ([{"role": role, "content": "hi"}], f"turn 1 of role {role!r}")
            for role in ("human", "gpt", "User", " user", "")
        ),
        (" ", "an empty text"),
        ("\u200b\u2060 \n", "an empty text"),
        (json.dumps([{"type": "text", "text": "hi"}]), "a list of content parts as text"),
        ([{"role": "user", "content": '[{"type": "text", "text": "hi"}]'}], "turn 1 with its parts of content as text"),
        ([], "an empty list"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": " "}], "an empty text as turn 2"),
        (["hi"], "str as turn 1"),
        ([USER, {"role": "assistant"}], "turn 2 without text as content"),
        ([{"from": "human", "value": "hi"}], "turn 1 without text as role and content"),
        ([USER, {"role": "assistant", "tool_calls": "add(3)"}], "turn 2 with str as tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "a part of type image_url"),
        ([{"role": "user", "content": ["hi"]}], "a part of type str"),
    ],
)
def test_content_that_cannot_be_passed_on_is_named(prompt: Any, named: str) -> None:
    with pytest.raises(NotWhole, match=named):
        turns_in(prompt)
