"""Answers that are held to a format: what the engine is asked, what is told of it, and that none is trained on."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from streamrl.producers.gateway.formats import AnswerFormat, ForcedCalls
from streamrl.schemas.trajectories import FinishReason
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import RUN, GatewayHarness, ScriptedEngine, running_gateway
from tests.producers.gateway.test_gateway import events

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"enum": ["Bern"]}}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
FIND: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "add"}}
TWO = '[{"name": "find", "parameters": {"city": "B"}}, {"name": "add", "parameters": {"a": "x:{\\"}"} }]'
SAYS = {"json": '{"a": 1}', "named": ' {"a": 1}', "two": TWO}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    async with running_gateway(tmp_path, engines=[ScriptedEngine(says=SAYS)], kind="vllm", longest=256) as made:
        yield made


async def test_the_engine_gets_the_schema_and_the_answer_is_its_text(it: GatewayHarness) -> None:
    asked = {"type": "json_object"}, json_schema(CITY), {"type": "text"}
    answers = [await it.chat("json", response_format=one) for one in asked]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ['{"a": 1}'] * 3
    given_schemas = [request.json_schema for request in it.engine.requests]
    assert [json.loads(schema or "null") for schema in given_schemas] == [{"type": "object"}, CITY, None]


async def test_a_named_call_is_made_of_the_whole_text(it: GatewayHarness) -> None:
    answer = (await it.chat("named", tools=[ADD, FIND], tool_choice=NAMED)).json()["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", None)
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert json.loads(it.engine.requests[0].json_schema) == {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_required_calls_are_streamed_one_by_one(it: GatewayHarness, stream: bool) -> None:
    answer = await it.chat("two", tools=[ADD, FIND], tool_choice="required", stream=stream)
    calls: list[dict[str, Any]] = []
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(answer)]
        assert chunks[0]["delta"]["role"] == "assistant"
        assert not any(chunk["delta"].get("content") for chunk in chunks)
        deltas = [delta for chunk in chunks for delta in chunk["delta"].get("tool_calls", ())]
        for delta in deltas:
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append(delta["function"])
            else:
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
        assert len(deltas) > 10
        reason = chunks[-1]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        reason, calls = choice["finish_reason"], [call["function"] for call in choice["message"]["tool_calls"]]
    assert reason == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("find", '{"city": "B"}'),
        ("add", '{"a": "x:{\\"}"}'),
    ]
    schema = json.loads(it.engine.requests[0].json_schema)
    assert schema["$defs"]["tool1"]["properties"]["city"] == {"$ref": "#/$defs/tool1/$defs/City"}
    assert "maxItems" not in schema


async def test_without_parallel_calls_at_most_one_is_made_and_a_cut_off_one_is_marked(it: GatewayHarness) -> None:
    asked: dict[str, Any] = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    choice = (await it.chat("two", **asked, max_tokens=40)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city":', "length")
    assert json.loads(it.engine.requests[0].json_schema)["maxItems"] == 1


def refused(answer: httpx.Response, param: str, word: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert word in error["message"], error
    assert len(error["message"]) < 600


DEEP: dict[str, Any] = {"items": {}}
for _ in range(40):
    DEEP = {"items": DEEP}
BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "strin"}, "JSON schema"),
    ({"properties": 5}, "JSON schema"),
    ({"properties": {"a": {"not": {}}}}, "without not"),
    ({"$ref": "https://example.org/schema"}, "references within"),
    ({"$ref": 5}, "references within"),
    (DEEP, "levels"),
    ({"enum": ["x" * 70_000]}, "characters"),
    ({"pattern": "a{1,10000}"}, "counts"),
    ({"patternProperties": {"(a{40}){40}": {}}}, "counts"),
    ({"pattern": "(?=a)b"}, "without look-ahead"),
]


@pytest.mark.parametrize(("schema", "word"), BAD_SCHEMAS)
async def test_a_bad_schema_is_refused_and_no_engine_hears_of_it(it: GatewayHarness, schema: Any, word: str) -> None:
    refused(await it.chat(response_format=json_schema(schema)), "response_format", word)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}}}}
    for choice in ("required", NAMED):
        refused(await it.chat(tools=[tool], tool_choice=choice), "tools", word)
    assert not it.engine.requests


STRICT = {"type": "function", "function": {"name": "add", "strict": True}}
BAD_FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}}, "response_format", ""),
    ({"response_format": json_schema([])}, "response_format.json_schema.schema", "dictionary"),
    ({"response_format": {"type": "regex"}}, "response_format.type", ""),
    ({"response_format": {"type": "json_object"}, "tools": [ADD]}, "response_format", "cannot call tools"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "one of"),
    ({"tools": [ADD, ADD], "tool_choice": NAMED}, "tool_choice", "one of"),
    ({"tools": [ADD], "tool_choice": "always"}, "tool_choice", ""),
    ({"tool_choice": "required"}, "tool_choice", "with tools"),
    ({"tools": [STRICT]}, "tools", "strict"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "array"}}}],
            "tool_choice": "required",
        },
        "tools",
        "object",
    ),
]


@pytest.mark.parametrize(("asked", "param", "word"), BAD_FORMATS)
async def test_contradicting_formats_are_refused(
    it: GatewayHarness, asked: dict[str, Any], param: str, word: str
) -> None:
    refused(await it.chat(**asked), param, word)


@pytest.mark.parametrize("kind", ["transformers", "emulated"])
async def test_an_engine_that_cannot_is_named_with_what_was_asked(tmp_path: Path, kind: str) -> None:
    async with running_gateway(tmp_path, kind=kind) as it:
        refused(await it.chat(response_format={"type": "json_object"}), "response_format", f"engine = {kind}")
        refused(await it.chat(tools=[ADD], tool_choice="required"), "tool_choice", f"engine = {kind}")


async def test_formats_that_only_the_engine_can_check_are_refused_as_well(it: GatewayHarness) -> None:
    it.engine.refuses = "expected a JSON schema that vLLM can hold a completion to, got another"
    refused(await it.chat(response_format=json_schema({})), "response_format", "vLLM")
    refused(await it.chat(tools=[ADD], tool_choice="required", stream=True), "tools", "vLLM")
    it.engine.refuses = ""
    it.engine.says, it.engine.ends_with = {"hello": ""}, FinishReason.ABORT
    assert (await it.chat()).status_code == 502


async def feedback(it: GatewayHarness, **body: Any) -> httpx.Response:
    return await it.client.post("/v1/feedback", json=body)


async def test_constrained_completions_are_not_trained_and_feedback_says_why(it: GatewayHarness) -> None:
    answers = [
        await it.chat("json", response_format={"type": "json_object"}, n=2),
        await it.chat("named", tools=[ADD], tool_choice=NAMED, stream=True),
        await it.chat("json", response_format={"type": "json_object"}, store=False),
        await it.chat("json", response_format={"type": "text"}),
    ]
    told = [answer.headers["x-streamrl-feedback"] for answer in answers]
    assert told == ["constrained", "constrained", "none", "open"]
    assert it.gateway.desk.store.counts.constrained == 3
    refused(await feedback(it, id=answers[0].json()["id"], rewards=[1.0, 0.0]), "id", "with a response_format")
    refused(await feedback(it, id=events(answers[1])[0]["id"], reward=1.0), "id", "forced tool_choice")
    assert (await feedback(it, id=answers[2].json()["id"], reward=1.0)).status_code == 404
    assert (await feedback(it, id=answers[3].json()["id"], reward=1.0)).status_code == 200
    await until(lambda: len(it.trajectories) == 1)
    assert it.gateway.desk.store.counts.kept == 1


async def test_a_constrained_call_of_a_session_is_read_by_the_next_and_not_trained(it: GatewayHarness) -> None:
    headers = {"x-session-id": "s"}
    said = {"role": "user", "content": "json"}
    body: dict[str, Any] = {"model": RUN, "messages": [said]}
    held = await it.client.post(
        "/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}}, headers=headers
    )
    assert held.headers["x-streamrl-feedback"] == "constrained"
    assert "x-streamrl-session" not in held.headers
    refused(await feedback(it, id=held.json()["id"], reward=1.0), "id", "response_format")
    body["messages"] += [held.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    free = await it.client.post("/v1/chat/completions", json=body, headers=headers)
    assert free.headers["x-streamrl-session"] == "new"
    assert (await feedback(it, session="s", reward=1.0)).status_code == 200
    await until(lambda: len(it.trajectories) == 1)
    (trajectory,) = it.trajectories
    assert len(trajectory.turns) == 1
    assert trajectory.loss_mask.all()
    assert '{"a": 1}' in trajectory.prompt_text


@pytest.mark.parametrize("begun", [0, 2])
async def test_one_that_was_begun_is_not_gone_on_with_elsewhere(tmp_path: Path, begun: int) -> None:
    engines = [ScriptedEngine(says=SAYS, fail_at=begun, failures=1) for _ in range(2)]
    async with running_gateway(tmp_path, engines=engines, kind="vllm") as it:
        answer = await it.chat("json", response_format={"type": "json_object"})
        assert answer.status_code == (502 if begun else 200)
        assert "scripted failure" in answer.text or not begun


class Answer(BaseModel):
    """What OpenAI's client makes of the text."""

    a: int


async def test_openai_s_client_parses_what_it_asked_for(it: GatewayHarness) -> None:
    import openai  # takes a second, in every process that collects tests

    await until(lambda: bool(it.gateway.address))
    async with openai.AsyncOpenAI(base_url=f"{it.gateway.address}/v1", api_key=it.key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "json"}]
        found = await client.chat.completions.parse(model=RUN, messages=messages, response_format=Answer)
        assert found.choices[0].message.parsed == Answer(a=1)
        messages = [{"role": "user", "content": "named"}]
        tools = [openai.pydantic_function_tool(Answer, name="add")]
        choice: Any = NAMED
        called = await client.chat.completions.parse(model=RUN, messages=messages, tools=tools, tool_choice=choice)
        (call,) = called.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Answer(a=1)
        async with client.chat.completions.stream(
            model=RUN, messages=messages, tools=tools, tool_choice=choice
        ) as calling:
            (call,) = (await calling.get_final_completion()).choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Answer(a=1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "find"]), st.dictionaries(st.text(), VALUES)), min_size=1)


@settings(deadline=None)
@given(CALLS, st.integers(1, 7), st.sampled_from([None, 1]))
def test_calls_are_read_from_any_pieces_of_their_text(
    calls: list[tuple[str, Any]], size: int, indent: int | None
) -> None:
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls], indent=indent)
    reader, found = ForcedCalls(None), list[tuple[str, str]]()
    for start in range(0, len(text), size):
        for piece in reader.read(text[start : start + size]):
            if piece.name is not None:
                assert piece.number == len(found)
                found.append((piece.name, piece.arguments))
            else:
                found[piece.number] = found[piece.number][0], found[piece.number][1] + piece.arguments
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    whole = AnswerFormat("tools", "", "required").parse(text)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
