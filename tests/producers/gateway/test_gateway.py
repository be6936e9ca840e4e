"""What requesters are answered, over the application without a socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.producers.gateway import app, service
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.identifiers import PolicyVersion, partition_of_worker
from streamrl.schemas.topics import WORK_ORDERS
from streamrl.schemas.trajectories import FinishReason
from tests.fakes.topics import send
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import RUN, GatewayHarness, ScriptedEngine, running_gateway
from tests.producers.generation.factories import WORKER, work_order

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    engine = ScriptedEngine(says={"6 x 7": "forty-two", "tool": f"see: {CALL}", "stop": "one STOP two", "é": "é🙂é"})
    async with running_gateway(tmp_path, engines=[engine]) as made:
        yield made


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends with one [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    return [json.loads(line) for line in lines[:-1]]


async def test_a_conversation_is_answered_with_the_weights_that_sampled_it(it: GatewayHarness) -> None:
    answer = await it.chat("6 x 7", logprobs=True, return_token_ids=True)
    body = answer.json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "forty-two", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert "".join(map(chr, choice["prompt_token_ids"])) == "user: 6 x 7"
    assert choice["token_ids"] == [*map(ord, "forty-two"), 0]
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 10, "total_tokens": 21}
    said = choice["logprobs"]["content"]
    assert [one["token"] for one in said] == [*"forty-two", "<eos>"]
    assert said[0] == {"token": "f", "logprob": -0.5, "bytes": [102], "top_logprobs": []}
    assert choice["weight_versions"] == [{"version": "1-0", "start": 0, "end": 10}]
    assert body["weight_version"] == answer.headers["x-streamrl-weight-version"] == "1-0"
    assert body["id"].startswith("chatcmpl-")


async def test_a_stream_says_the_same_token_by_token(it: GatewayHarness) -> None:
    answer = await it.chat("6 x 7", stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    *chunks, last = events(answer)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "forty-two"
    assert [one for choice in choices for one in choice["token_ids"]] == [*map(ord, "forty-two"), 0]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["weight_versions"] == [{"version": "1-0", "start": 0, "end": 10}]
    assert "usage" not in events(await it.chat("6 x 7", stream=True))[-1], "only when asked for"


async def test_tokens_are_sent_as_they_come_and_not_at_the_end(it: GatewayHarness) -> None:
    it.engine.hold_at = 3
    chunks: list[str] = []

    async def send(message: Any) -> None:
        chunks.append(message.get("body", b"").decode())

    body = json.dumps({"model": RUN, "prompt": "6 x 7", "stream": True}).encode()
    asking = asyncio.create_task(it.ask("/v1/completions", body, send))
    await until(lambda: '"text":"r"' in "".join(chunks))
    assert "[DONE]" not in "".join(chunks)
    it.engine.release.set()
    await asking
    assert "".join(chunks).endswith("data: [DONE]\n\n")


async def test_n_samples_of_each_prompt_are_choices_in_order(it: GatewayHarness) -> None:
    body = (await it.text(["ab", [ord("c")], "6 x 7"], n=2, max_tokens=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [*range(6)]
    assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "c", "c", "for", "for"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop"] * 4 + ["length"] * 2
    assert body["usage"]["prompt_tokens"] == 8


async def test_a_seed_gives_each_choice_random_numbers_of_its_own(it: GatewayHarness) -> None:
    await it.text("ab", n=3, seed=7)
    first = [request.sampling.seed for request in it.engine.requests]
    await it.text("ab", n=3, seed=7)
    second = [request.sampling.seed for request in it.engine.requests][3:]
    assert first == second
    assert len(set(first)) == 3
    await it.text("ab")
    assert it.engine.requests[-1].sampling.seed is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_cut_off_and_never_sent(it: GatewayHarness, stream: bool) -> None:
    answer = await it.chat("stop", stop=["STOP", "never"], stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(answer)]
        text, reason = "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("one ", "stop")


async def test_tool_calls_are_separated_from_text(it: GatewayHarness) -> None:
    choice = (await it.chat("tool", tools=TOOLS)).json()["choices"][0]
    assert "tools: ['add']" in "".join(map(chr, it.engine.requests[-1].prompt_token_ids))
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["message"]["content"] == "see:"
    assert choice["finish_reason"] == "tool_calls"
    choices = [chunk["choices"][0] for chunk in events(await it.chat("tool", tools=TOOLS, stream=True))]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "see: "
    (calls,) = [choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (calls[0]["index"], choices[-1]["finish_reason"]) == (0, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_without_tools_all_is_text(it: GatewayHarness, stream: bool) -> None:
    answer = await it.chat("tool", stream=stream, tools=TOOLS, tool_choice="none")
    if stream:
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(answer))
    else:
        text = answer.json()["choices"][0]["message"]["content"]
    assert text == f"see: {CALL}"


async def test_a_turn_of_a_tool_reaches_the_template(it: GatewayHarness) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        # As verifiers sends an answer back, which had no reasoning.
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    answer = await it.client.post("/v1/chat/completions", json={"model": RUN, "messages": messages})
    assert answer.status_code == 200
    prompt = "".join(map(chr, it.engine.requests[-1].prompt_token_ids))
    assert prompt == "system: be short\nuser: ab\nassistant: \ntool: 2"


async def test_the_model_is_listed_with_its_weights(it: GatewayHarness) -> None:
    listed = (await it.client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["weight_version"]) for one in listed] == [(RUN, "1-0")]
    assert (await it.client.get(f"/v1/models/{RUN}")).json()["id"] == RUN
    unknown = await it.client.get("/v1/models/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_new_weights_are_named_from_their_first_token_on(it: GatewayHarness) -> None:
    it.engine.hold_at = 4
    asking = asyncio.create_task(it.chat("6 x 7"))
    await until(lambda: it.gateway.pool.generated_tokens == 4)
    it.engine.version = PolicyVersion(1, 1)
    it.engine.release.set()
    spans = (await asking).json()["choices"][0]["weight_versions"]
    assert spans == [{"version": "1-0", "start": 0, "end": 4}, {"version": "1-1", "start": 4, "end": 10}]


async def test_a_disconnected_requester_frees_its_slots(it: GatewayHarness) -> None:
    it.engine.hold_at = 2
    gone = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body"):
            gone.set()

    body = json.dumps({"model": RUN, "prompt": "6 x 7", "n": 2, "stream": True}).encode()
    await it.ask("/v1/completions", body, send, gone)
    assert it.gateway.pool.running == 0
    await until(lambda: it.engine.running == 0)
    assert (await it.client.get("/health")).status_code == 200


async def test_a_reader_that_takes_nothing_is_made_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READER_TIMEOUT_S", 0.05)
    async with running_gateway(tmp_path, engines=[ScriptedEngine()]) as it:

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        await it.ask("/v1/completions", json.dumps({"model": RUN, "prompt": "abc", "stream": True}).encode(), send)
        assert it.gateway.pool.running == 0


async def test_done_is_sent_once_also_behind_the_error_of_a_request_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REQUEST_TIMEOUT_S", 0.1)
    async with running_gateway(tmp_path, engines=[ScriptedEngine(hold_at=1)]) as it:
        answer = await it.text("abc")
        assert answer.status_code == 502
        assert "expected an answer within 0.1 s" in answer.json()["error"]["message"]
        streamed = await it.text("abc", stream=True)
        *_, last = events(streamed)
        assert "expected an answer within 0.1 s" in last["error"]["message"]
        await until(lambda: it.engine.running == 0)


async def test_requests_keep_to_their_slots_and_orders_to_theirs(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_num_seqs=8, hold_at=0)
    async with running_gateway(tmp_path, engines=[engine], slots=3) as it:
        asking = [asyncio.create_task(it.text("abc")) for _ in range(5)]
        await until(lambda: engine.running == 3 and len(it.gateway.pool.queued) == 2)
        assert {beat.capacity for beat in it.heartbeats} == {5}
        engine.release.set()
        assert {(await one).status_code for one in asking} == {200}
        assert engine.most == 3


async def test_requests_beyond_the_queue_are_refused_and_when_to_come_again(tmp_path: Path) -> None:
    engine = ScriptedEngine(hold_at=0)
    async with running_gateway(tmp_path, engines=[engine], slots=1, max_queued=1) as it:
        it.gateway.pool.queue_timeout_s = 0.3
        first, second = (asyncio.create_task(it.text("abc")) for _ in range(2))
        await until(lambda: len(it.gateway.pool.queued) == 1)
        refused = await it.text("abc")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await second).status_code == 429, "it has waited too long"
        engine.release.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_lost_worker_loses_no_request(tmp_path: Path, hold_at: int) -> None:
    engines = [ScriptedEngine(hold_at=hold_at), ScriptedEngine(hold_at=hold_at, version=PolicyVersion(1, 1))]
    async with running_gateway(tmp_path, engines=engines, slots=2) as it:
        for engine, number in zip(engines, (0, 1), strict=True):
            engine.version = PolicyVersion(1, number)
        asking = [asyncio.create_task(it.chat("abc", stream=stream)) for stream in (True, False)]
        await until(lambda: all(engine.running == 1 for engine in engines))
        await until(lambda: it.gateway.pool.generated_tokens == 2 * hold_at)
        it.stops[0].set()
        await it.workers[0]
        engines[1].release.set()
        streamed, whole = [await one for one in asking]
        chunks = events(streamed)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "user: abc"
        assert whole.json()["choices"][0]["message"]["content"] == "user: abc"
        spans = [chunks[-1]["choices"][0]["weight_versions"], whole.json()["choices"][0]["weight_versions"]]
        went_on = [{"version": "1-0", "start": 0, "end": 2}, {"version": "1-1", "start": 2, "end": 10}]
        alone = [{"version": "1-1", "start": 0, "end": 10}]
        assert sorted(spans, key=len) == ([alone, went_on] if hold_at else [alone, alone])
        for call_id in (chunks[0]["id"], whole.json()["id"]):
            await it.client.post("/v1/feedback", json={"id": call_id, "reward": 1.0})
        await until(lambda: len(it.trajectories) == 2)
        parts = sorted(([(part.worker_id, part.start) for part in one.parts] for one in it.trajectories), key=len)
        assert parts == ([[], [("w0", 0), ("w1", 2)]] if hold_at else [[], []])
        assert {one.worker_id for one in it.trajectories} == {"w1"}


async def test_two_hundred_streams_continue_after_their_worker_is_lost(tmp_path: Path) -> None:
    engines = [ScriptedEngine(max_num_seqs=200, hold_at=2) for _ in range(2)]
    async with running_gateway(tmp_path, engines=engines, slots=200) as it:
        asking = [asyncio.create_task(it.chat("abc", stream=True)) for _ in range(200)]
        await until(lambda: it.gateway.pool.generated_tokens == 2 * 200, timeout_s=20)
        assert all(engine.running > 50 for engine in engines)
        it.stops[0].set()
        await it.workers[0]
        engines[1].release.set()
        for one in asking:
            said = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(await one)]
            assert "".join(said) == "user: abc"
        assert it.gateway.pool.lost == 0


async def test_without_another_worker_a_stream_ends_with_a_clear_error(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[ScriptedEngine(hold_at=2)]) as it:
        it.gateway.pool.queue_timeout_s = 0.2
        asking = asyncio.create_task(it.chat("abc", stream=True))
        await until(lambda: it.gateway.pool.generated_tokens == 2)
        it.stops[0].set()
        chunks = events(await asking)
        assert chunks[-1]["error"]["code"] == "service_unavailable"
        assert "choices" in chunks[0]


@pytest.mark.parametrize(("failures", "fail_at", "status"), [(1, 0, 200), (1, 2, 200), (3, 0, 502), (3, 2, 502)])
async def test_a_failed_engine_is_asked_again_from_the_last_token_on(
    it: GatewayHarness, failures: int, fail_at: int, status: int
) -> None:
    it.engine.failures, it.engine.fail_at = failures, fail_at
    answer = await it.chat("6 x 7")
    assert answer.status_code == status
    assert (await it.chat("6 x 7")).status_code == 200


async def test_without_a_worker_requests_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as it:
        assert (await it.client.get("/ready")).status_code == 200
        it.stops[0].set()
        await it.workers[0]
        await until(lambda: not it.gateway.pool.ready)
        answer = await it.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert (await it.client.get("/ready")).status_code == 503


async def test_requests_need_no_broker(it: GatewayHarness) -> None:
    it.bus.fail = lambda record: BusUnavailable("no broker")
    assert (await it.chat("6 x 7")).status_code == 200


async def test_a_session_stays_where_its_beginning_is_cached(tmp_path: Path) -> None:
    engines = [ScriptedEngine() for _ in range(3)]
    async with running_gateway(tmp_path, engines=engines) as it:
        for turn in range(6):
            answer = await it.client.post(
                "/v1/completions",
                json={"model": RUN, "prompt": "x" * (20 + turn)},
                headers={"x-session-id": "s"},
            )
            assert answer.status_code == 200
        assert sorted(len(engine.requests) for engine in engines) == [0, 0, 6]


async def test_an_aborted_completion_is_an_error(it: GatewayHarness) -> None:
    it.engine.ends_with = FinishReason.ABORT
    assert (await it.chat("6 x 7")).status_code == 502


async def test_orders_leave_the_slots_of_requests_alone(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_num_seqs=4, hold_at=0)
    async with running_gateway(tmp_path, engines=[engine], slots=1) as it:
        order = work_order(0, samples=8, sample_indices=tuple(range(8)))
        await send(it.bus, RUN, WORK_ORDERS, order, order.group_id, partition_of_worker(WORKER))
        await until(lambda: engine.running == 3)
        asking = asyncio.create_task(it.text("abc"))
        await until(lambda: engine.running == 4)
        assert it.gateway.pool.running == 1
        engine.release.set()
        assert (await asking).status_code == 200
        await until(lambda: len(it.trajectories) == 8)
        assert engine.most == 4
