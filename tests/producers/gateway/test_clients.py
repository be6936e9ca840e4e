"""The gateway on a real socket: OpenAI's own client unchanged, and what a fuzzer makes of its description."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import RUN, GatewayHarness, ScriptedEngine, running_gateway

if TYPE_CHECKING:
    import schemathesis
    from openai.types.chat import ChatCompletionFunctionToolParam

TOOLS: "list[ChatCompletionFunctionToolParam]" = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
EXAMPLES = 6
"""Requests that the fuzzer makes of each kind for each operation: with 150 it takes minutes, and finds no more."""


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    engine = ScriptedEngine(says={"6 x 7": "forty-two", "tool": CALL})
    async with running_gateway(tmp_path, engines=[engine], kind="vllm") as made:
        await until(lambda: bool(made.gateway.address))
        yield made


async def test_the_async_client_is_answered(it: GatewayHarness) -> None:
    import openai  # takes a second, in every process that collects tests

    async with openai.AsyncOpenAI(base_url=f"{it.gateway.address}/v1", api_key=it.key, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [RUN]
        answer = await client.chat.completions.create(
            model=RUN,
            messages=[{"role": "user", "content": "6 x 7"}],
            logprobs=True,
            n=2,
            seed=1,
            extra_body={"return_token_ids": True},
        )
        assert [choice.message.content for choice in answer.choices] == ["forty-two"] * 2
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.content or ()) == 10
        assert answer.model_dump()["weight_version"] == "1-0"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20
        stream = await client.chat.completions.create(
            model=RUN,
            messages=[{"role": "user", "content": "6 x 7"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "forty-two"
        assert chunks[-1].usage is not None
        async with client.chat.completions.stream(
            model=RUN, messages=[{"role": "user", "content": "tool"}], tools=TOOLS
        ) as calling:
            final = await calling.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert final.choices[0].finish_reason == "tool_calls"
        with pytest.raises(openai.NotFoundError, match="expected model"):
            await client.completions.create(model="other", prompt="a")
    async with openai.AsyncOpenAI(base_url=f"{it.gateway.address}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_the_client_is_answered(it: GatewayHarness) -> None:
    import openai  # takes a second, in every process that collects tests

    def ask() -> None:
        with openai.OpenAI(base_url=f"{it.gateway.address}/v1", api_key=it.key, max_retries=0) as client:
            text = client.completions.create(model=RUN, prompt=["ab", "cd"], logprobs=0, max_tokens=8)
            assert [choice.text for choice in text.choices] == ["ab", "cd"]
            assert text.choices[0].logprobs is not None
            assert text.choices[0].logprobs.tokens == ["a", "b", "<eos>"]
            assert text.choices[0].logprobs.text_offset == [0, 1, 2]
            said = client.completions.create(model=RUN, prompt="abc", stream=True)
            assert "".join(chunk.choices[0].text for chunk in said) == "abc"
            turn = client.chat.completions.create(
                model=RUN, messages=[{"role": "user", "content": "tool"}], tools=TOOLS, tool_choice="auto"
            )
            message = turn.choices[0].message
            (call,) = message.tool_calls or []
            spoken: Any = message.model_dump(exclude_none=True)
            again = client.chat.completions.create(
                model=RUN,
                messages=[
                    {"role": "user", "content": "6 x 7"},
                    spoken,
                    {"role": "tool", "tool_call_id": call.id, "content": "2"},
                ],
                tools=TOOLS,
            )
            assert again.choices[0].message.content == "forty-two"

    await asyncio.to_thread(ask)


async def test_a_last_worker_that_dies_in_a_stream_is_an_error_of_the_client(it: GatewayHarness) -> None:
    import openai  # takes a second, in every process that collects tests

    it.engine.hold_at = 2
    it.gateway.pool.queue_timeout_s = 0.2
    async with openai.AsyncOpenAI(base_url=f"{it.gateway.address}/v1", api_key=it.key, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=RUN, messages=[{"role": "user", "content": "6 x 7"}], stream=True
        )
        await anext(aiter(stream))
        it.stops[0].set()
        with pytest.raises(openai.APIError, match="free slot"):
            async for _ in stream:
                pass


async def test_a_client_that_is_gone_frees_its_slot(it: GatewayHarness) -> None:
    it.engine.hold_at = 2
    body = json.dumps({"model": RUN, "prompt": "abc", "stream": True}).encode()
    host, _, port = it.gateway.address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = ("POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {it.key}")
    more = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue")
    writer.write("\r\n".join([*head, *more, "", ""]).encode())
    assert b"100 Continue" in await reader.readline()
    writer.write(body)
    await until(lambda: it.gateway.pool.running == 1)
    writer.transport.abort()
    await until(lambda: it.engine.running == 0)
    for line in (b"GET /health HTTP/1.0\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
        writer.write(line)
        status = int((await reader.readline()).split()[1])
        assert 400 <= status < 500
        writer.close()


async def test_no_request_makes_the_gateway_fail(it: GatewayHarness) -> None:
    """schemathesis over the OpenAPI description."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok

    statuses: Counter[int] = Counter()

    def check(strategy: "st.SearchStrategy[schemathesis.Case[Any]]") -> None:
        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[*HealthCheck])
        @given(case=strategy)
        def answered(case: "schemathesis.Case[Any]") -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = RUN  # which no fuzzer guesses, and all else would be behind
            response = case.call(headers={"Authorization": f"Bearer {it.key}"})
            case.validate_response(response, checks=[not_a_server_error])
            statuses[response.status_code] += 1

        answered()

    def fuzz() -> None:
        api = schemathesis.openapi.from_url(f"{it.gateway.address}/openapi.json")
        for found in api.get_all_operations():
            assert isinstance(found, Ok), found
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                with suppress(Unsatisfiable):  # of an operation without parameters nothing is wrong
                    check(found.ok().as_strategy(generation_mode=mode))

    await asyncio.to_thread(fuzz)
    assert statuses[200]
    assert statuses[400]
