"""Prompts of twenty model families have the tokens that transformers renders, one opening, and an open last turn."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.trajectories import ChatTurn, Prompt
from tests.producers.generation.chat_templates import ANSWER, FAMILIES, NEXT, QUESTION, save_tokenizer

FIXED = [("user", QUESTION), ("assistant", ANSWER), ("user", NEXT)]
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=12)
Turns = list[tuple[str, str]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def tokenizer_of(name: str) -> ModelTokenizer:
        directory: Path = tmp_path_factory.mktemp(name)
        save_tokenizer(FAMILIES[name], directory)
        return ModelTokenizer(str(directory))

    return tokenizer_of


def prompt(turns: Turns) -> Prompt:
    content = tuple(ChatTurn(role=role, content=text) for role, text in turns)
    return Prompt(prompt_id="p/0", dataset="p", content=content)


def rendered(tokenizer: ModelTokenizer, turns: Turns) -> list[int]:
    """What transformers makes of the turns: the last one of the assistant's is continued."""
    continues = turns[-1][0] == "assistant"
    found: list[int] = tokenizer.transformers_tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return found


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, Turns]:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    turns = [("system", draw(TEXTS))] if FAMILIES[name].takes_system and draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 4))):
        turns.append((("user", "assistant")[number % 2], draw(TEXTS)))
    return name, turns


@given(drawn=conversations())
@settings(deadline=None, max_examples=120)
def test_tokens_are_those_that_transformers_renders(opened: Any, drawn: tuple[str, Turns]) -> None:
    name, turns = drawn
    tokenizer = opened(name)
    assert tokenizer.encode_prompt(prompt(turns)) == rendered(tokenizer, turns)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_what_the_family_writes(opened: Any, name: str) -> None:
    tokenizer = opened(name)
    token_ids = tokenizer.encode_prompt(prompt(FIXED))
    assert tokenizer.decode_with_special(token_ids) == FAMILIES[name].rendered
    special = [token for token in token_ids if token >= 256]
    assert len(special) == sum(FAMILIES[name].rendered.count(one) for one in {*FAMILIES[name].special})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_last_turn_of_the_assistant_is_continued(opened: Any, name: str) -> None:
    tokenizer, family = opened(name), FAMILIES[name]
    started = "Let me think: <answer>"
    token_ids = tokenizer.encode_prompt(prompt([*FIXED, ("assistant", started)]))
    assert tokenizer.decode_with_special(token_ids).endswith(started), "neither closed nor opened again"
    # Up to the text it is what the family writes before an answer; some open an answer only with its thoughts.
    before = family.rendered.removesuffix("<think>\n").removesuffix("<|start|>assistant")
    assert tokenizer.decode_with_special(token_ids).startswith(before)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_that_starts_with_the_opening_gets_no_second_one(opened: Any, name: str) -> None:
    tokenizer, opening = opened(name), "".join(FAMILIES[name].opening)
    ids_of = tokenizer.encode_more
    for text in ("What is 12 times 7?", "", " <", FAMILIES[name].rendered.removeprefix(opening)):
        assert tokenizer.encode_text(text) in (ids_of(opening + text), ids_of(text))
        assert tokenizer.encode_text(opening + text) == ids_of(opening + text)
        if text:
            assert tokenizer.encode_text(text) == ids_of(opening + text)


def test_a_turn_that_calls_tools_cannot_be_continued(opened: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    with pytest.raises(ValueError, match="expected a tool's turn after an assistant's turn with tool_calls, got none"):
        opened("smollm2").encode_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
