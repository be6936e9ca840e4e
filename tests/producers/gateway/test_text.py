"""What may be sent of a text that grows by tokens, with stop strings and tool calls in it."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.producers.gateway.requests import ToolDefinition
from streamrl.producers.gateway.text import ReplyText
from streamrl.producers.gateway.tool_calls import FunctionCall, HermesToolCalls, JsonToolCalls, ParsedReply
from streamrl.producers.generation.rollout import shown_text
from streamrl.schemas.trajectories import FinishReason, SamplingParams
from tests.producers.generation.engines.test_stop_matcher import ByteTokenizer

ADD = ToolDefinition.model_validate({"type": "function", "function": {"name": "add"}})
TOKENIZER = ByteTokenizer()


def sent(text: str, cuts: Sequence[int], sampling: SamplingParams, openers: Sequence[str] = ()) -> list[str]:
    """The pieces that are sent as the text's tokens come in pieces of these lengths, the engine ending at a stop."""
    tokens, reply, pieces = TOKENIZER.encode(text), ReplyText(TOKENIZER.decode, sampling, openers), []
    at, seen = 0, 0
    while seen < len(tokens):
        step = cuts[at % len(cuts)]
        at += 1
        pieces.append(reply.decode_next(tokens[seen : seen + step]))
        seen += step
    return [*pieces, reply.finish(FinishReason.STOP)]


ALPHABET = "ab<é€🙂 "


@given(
    text=st.text(alphabet=ALPHABET, max_size=40),
    stop=st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    included=st.booleans(),
)
@example(text="a<b", stop=["<b"], cuts=[1], included=False)
@example(text="🙂🙂", stop=[], cuts=[1], included=False)
@example(text="<éééé🙂🙂", stop=[], cuts=[2], included=False)
@settings(deadline=None, max_examples=100)
def test_pieces_make_the_text_that_is_shown(text: str, stop: list[str], cuts: list[int], included: bool) -> None:
    sampling = SamplingParams(max_completion_length=999, stop=tuple(stop), include_stop_str_in_output=included)
    span = sampling.find_stop(text)
    ended = text if span is None else text[: span[1]]  # the engine samples nothing behind a stop string
    pieces = sent(ended, cuts, sampling)
    assert "".join(pieces) == shown_text(ended, FinishReason.STOP, sampling)
    assert not any("�" in piece for piece in pieces), "no half characters"


@given(
    words=st.lists(st.sampled_from(["4", " what", "a", "ab", "<é", "<think>", "</think>", "é\n", "<|im_end|>"])),
    stop=st.lists(st.sampled_from(["wh", "b", "ab<", "</think>", "hat<think>", "é", "<|im_end|>", "\n"]), max_size=3),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    flags=st.tuples(st.booleans(), st.booleans()),
)
@example(words=["4", " what"], stop=["wh"], cuts=[1], flags=(True, True))
@example(words=["4", "</think>"], stop=["</think>"], cuts=[1], flags=(True, True))
@settings(deadline=None, max_examples=200)
def test_a_stream_sends_what_is_recorded(
    words: list[str], stop: list[str], cuts: list[int], flags: tuple[bool, bool]
) -> None:
    """A token may have text behind the stop string, and special tokens may be text."""
    special = {"<think>", "</think>", "<|im_end|>"}
    sampling = SamplingParams(
        max_completion_length=99, stop=tuple(stop), include_stop_str_in_output=flags[0], skip_special_tokens=flags[1]
    )
    hidden = {one for one in special if flags[1] and not any(one in each for each in stop)}

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words[token] for token in token_ids if words[token] not in hidden)

    # The engine ends the completion with the token that completes a stop string.
    tokens = list(range(len(words)))
    ends = (end for end in tokens if sampling.find_stop(decode(tokens[: end + 1])) is not None)
    tokens = tokens[: next(ends, len(tokens)) + 1]
    reply, pieces, at = ReplyText(decode, sampling), [], 0
    for number in range(len(tokens)):
        step = cuts[number % len(cuts)]
        if at < len(tokens):
            pieces.append(reply.decode_next(tokens[at : at + step]))
            at += step
    pieces.append(reply.finish(FinishReason.STOP))
    assert "".join(pieces) == reply.text == shown_text(decode(tokens), FinishReason.STOP, sampling)


def test_text_that_cannot_begin_a_stop_string_is_sent_at_once() -> None:
    sampling = SamplingParams(max_completion_length=9, stop=("###",))
    assert sent("ab#c##", [1], sampling) == ["a", "b", "", "#c", "", "", "##"]


def test_from_an_opener_on_nothing_is_sent() -> None:
    sampling = SamplingParams(max_completion_length=99)
    pieces = sent("so <tool<tool_call>x", [1], sampling, HermesToolCalls().openers)
    assert "".join(pieces) == "so <tool"
    reply = ReplyText(TOKENIZER.decode, sampling, ("<tool_call>",))
    reply.decode_next(TOKENIZER.encode("so <tool_call>x"))
    reply.finish(FinishReason.STOP)
    assert reply.unsent == "<tool_call>x"


CALL = json.dumps({"name": "add", "arguments": {"a": 1}})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>{CALL}</tool_call>", "", 1),
        (f"see\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "see", 2),
        (f"<tool_call>{CALL}", "", 1),  # the end of the sequence took its place
        ("no call", "no call", 0),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, 0),
        (f"<tool_call>{CALL}</tool_call><tool_call>[</tool_call>", None, 0),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, 0),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, 0),
    ],
)
def test_hermes_calls(text: str, content: str | None, calls: int) -> None:
    found = HermesToolCalls().parse(text, [ADD])
    assert found == ParsedReply(text if content is None else content, (FunctionCall("add", '{"a": 1}'),) * calls)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, 1),
        (f"[{CALL}, {CALL}]", 2),
        ('{"name": "add", "parameters": {"a": 1}}', 1),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', 1),
        ('{"answer": 42}', 0),
        (f"[{CALL}, 1]", 0),
        ("[]", 0),
        ("text", 0),
    ],
)
def test_json_calls(text: str, calls: int) -> None:
    found = JsonToolCalls().parse(text, [ADD])
    assert found == ParsedReply("" if calls else text, (FunctionCall("add", '{"a": 1}'),) * calls)
