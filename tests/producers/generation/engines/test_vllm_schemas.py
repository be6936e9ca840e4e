"""Answers held to a format, from OpenAI's own client through a gateway and a worker's server to vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from streamrl.bus.memory import MemoryBus
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.rollout import WorkerLoad
from streamrl.producers.generation.status import WorkerStatus
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.settings import LoopSettings
from tests.fakes.messages import heartbeat
from tests.fakes.topics import create_topics
from tests.fakes.waiting import until
from tests.producers.generation.engines.conftest import SLOTS, KeptDecoder

if TYPE_CHECKING:
    from streamrl.producers.gateway.gateway import Gateway

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

RUN, V0 = "r", PolicyVersion(1, 0)


class Weather(BaseModel):
    """So few values that a model of random weights gets to the end of one."""

    city: Literal["Bern", "Rome"]
    sunny: bool


@dataclass
class Asked:
    """The gateway's client, and the gateway."""

    client: Any
    gateway: "Gateway"

    async def chat(self, **changes: Any) -> Any:
        body = {"model": RUN, "messages": [{"role": "user", "content": "how is it?"}], "seed": 1} | changes
        return await self.client.chat.completions.create(**body)


@pytest.fixture(scope="module")
async def it(
    vllm_decoder: KeptDecoder, characters_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Asked]:
    import openai

    # In here: without the gateway's room the tests of this folder can still be collected.
    from streamrl.producers.gateway.calls import ServedModel
    from streamrl.producers.gateway.gateway import Gateway
    from streamrl.producers.gateway.keys import KeyFile
    from streamrl.producers.gateway.settings import GatewaySettings
    from streamrl.producers.gateway.tool_calls import HermesToolCalls
    from streamrl.producers.gateway.worker_requests import RequestServer, RequestSlots

    path, bus = tmp_path_factory.mktemp("run"), create_topics(MemoryBus(), RUN)
    engine = ThreadedEngine(vllm_decoder.of(characters_dir), SLOTS)
    await engine.start()
    await engine.adopt(characters_dir, V0)
    status = WorkerStatus(version=V0)
    server = RequestServer(engine, WorkerLoad(), "w0", RequestSlots("127.0.0.1", 8, "s"), status)
    loop = LoopSettings(max_prompt_length=256, max_completion_length=256)
    gateway = Gateway(
        bus,
        RUN,
        ServedModel(RUN, "vllm", loop, ModelTokenizer(str(characters_dir)), HermesToolCalls()),
        GatewaySettings(enabled=True, port=0),
        "s",
        path / "gateway",
    )
    key = KeyFile(path / "gateway" / "keys.json").make_key("tester", train=True)
    stop = asyncio.Event()
    serving = asyncio.create_task(gateway.run(stop))
    try:
        await until(lambda: bool(gateway.address), timeout_s=30)
        gateway.pool.heard(heartbeat("w0", engine="vllm", version=V0, request_address=await server.open()))
        await until(lambda: bool(gateway.pool.ready), timeout_s=30)
        async with openai.AsyncOpenAI(base_url=f"{gateway.address}/v1", api_key=key, max_retries=0) as client:
            yield Asked(client, gateway)
    finally:
        stop.set()
        await serving
        await server.close()
        await engine.close()


async def test_the_client_parses_its_own_model(it: Asked) -> None:
    messages: Any = [{"role": "user", "content": "how is it?"}]
    found = await it.client.chat.completions.parse(
        model=RUN, messages=messages, response_format=Weather, n=4, seed=1, logprobs=True
    )
    assert all(isinstance(choice.message.parsed, Weather) for choice in found.choices)
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    async with it.client.chat.completions.stream(
        model=RUN, messages=messages, response_format=Weather, seed=1
    ) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)


async def test_tools_that_must_be_called_are_called(it: Asked) -> None:
    import openai

    messages: Any = [{"role": "user", "content": "how is it?"}]
    tools: Any = [openai.pydantic_function_tool(Weather, name=name) for name in ("look", "ask")]
    named: Any = {"type": "function", "function": {"name": "ask"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        body = {"model": RUN, "messages": messages, "tools": tools, "tool_choice": choice, "seed": 1}
        body["parallel_tool_calls"] = False
        called = await it.client.chat.completions.parse(**body)
        async with it.client.chat.completions.stream(**body) as stream:
            streamed = await stream.get_final_completion()
        for answer in (called, streamed):
            (call,) = answer.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Weather)
            assert call.function.name in ("look", "ask") if choice == "required" else call.function.name == "ask"
            assert answer.choices[0].finish_reason == reason
            assert not answer.choices[0].message.content


async def test_some_json_object_is_one_as_far_as_it_goes(it: Asked) -> None:
    answer = await it.chat(response_format={"type": "json_object"}, temperature=2.0, n=8)
    for choice in answer.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "idn-email"},  # vLLM's own checks know no such format
        {"$ref": "#/$defs/nowhere"},
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "string", "pattern": "^a{1,1000}$"},  # taken by the checks, and not by the compiler
    ],
)
async def test_a_schema_that_vllm_rejects_is_a_bad_request(it: Asked, schema: dict[str, Any]) -> None:
    import openai

    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        await it.chat(response_format=asked)
    body: Any = refused.value.body
    assert body["param"] == "response_format"
    assert len(body["message"]) < 600


async def test_only_what_no_format_was_forced_on_is_trained(it: Asked) -> None:
    await it.chat(n=4, temperature=2.0)
    await it.chat(response_format={"type": "json_object"}, max_tokens=2)
    assert it.gateway.desk.store.counts.constrained > 0
    await until(lambda: it.gateway.desk.store.counts.kept == 1)
