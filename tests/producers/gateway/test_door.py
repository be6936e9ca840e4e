"""Who is let in, and what is refused: each with a status of 400 or more, in OpenAI's shape, and in words."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from streamrl.producers.gateway import app
from streamrl.producers.gateway.keys import ANYONE, KeyFile, KeyRing, KeyUse
from streamrl.producers.gateway.refusals import ApiError
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.schemas.errors import UserError
from tests.fakes.clock import FakeClock
from tests.producers.gateway.gateway_harness import (
    RUN,
    CharacterTokenizer,
    GatewayHarness,
    ScriptedEngine,
    running_gateway,
)

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add"}}
BAD_CHATS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": None}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "content"),
    ({"messages": [{"role": "user"}]}, 400, "content"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, 400, "tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "type"),
    ({"messages": MESSAGES * 5000}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, 400, "at most 64 tokens"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, 400, "template"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 1e12}, 400, "max_tokens"),
    ({"max_tokens": 10**12}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, 400, "both"),
    ({"n": 0}, 400, "n"),
    ({"n": 10**6}, 400, "at most 64 completions"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 1e9}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -1}, 400, "top_k"),
    ({"top_logprobs": 1}, 400, "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 3}, 400, "sampled token only"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a", ""]}, 400, "stop"),
    ({"stop": ["a"] * 10**5}, 400, "stop"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, 400, "logit_bias"),
    ({"presence_penalty": 1.0}, 400, "presence_penalty"),
    ({"seed": 1 << 70}, 400, "seed"),
    ({"stream_options": {"include_usage": True}}, 400, "stream"),
    ({"tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, 400, "tool_choice"),
    ({"tool_choice": "auto"}, 400, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "name"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, 400, "response_format"),
    ({"modalities": ["audio"]}, 400, "modalities"),
    ({"unheard_of": 1}, 400, "unheard_of"),
    ({"model": "gpt-4o"}, 404, "expected model r"),
    ({"model": ""}, 400, "model"),
]
BAD_TEXTS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "at least one token"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [1 << 31]}, 400, "prompt"),
    ({"prompt": ["a"] * 65}, 400, "at most 64 completions"),
    ({"logprobs": 2}, 400, "sampled token only"),
    ({"echo": True}, 400, "echo"),
    ({"best_of": 4}, 400, "best_of"),
    ({"suffix": "x"}, 400, "suffix"),
]
BAD_BODIES: list[tuple[bytes, dict[str, str], int]] = [
    (b"", {}, 400),
    (b"{", {}, 400),
    (b"[]", {}, 400),
    (b"null", {}, 400),
    (b'{"model": "r", "model": "r"}', {}, 400),
    (b'{"temperature": NaN}', {}, 400),
    (b'{"temperature": 1e999}', {}, 400),
    (b"\xff\xfe", {}, 400),
    (b"[" * 60_000, {}, 400),
    (b'{"model":' * 900 + b"1" + b"}" * 900, {}, 400),
    (b'{"n": ' + b"1" * 5000 + b"}", {}, 400),
    (b'{"model": "r", "messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
    (b'{"model": "r", "messages": [{"role": "user", "content": "a\\u0000b"}]}', {}, 400),
    (b"{}", {"content-type": "text/plain"}, 415),
    (b"model=r", {"content-type": "application/x-www-form-urlencoded"}, 415),
    (gzip.compress(b"\0" * 10**6), {"content-encoding": "gzip"}, 415),
    (b"x" * 70_000, {}, 413),
]


@pytest.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayHarness]:
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1 << 16)
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.2)
    async with running_gateway(tmp_path, allowed_origins=("https://ours",)) as made:
        yield made


def refused(answer: httpx.Response, status: int, word: str = "") -> None:
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"], error["message"]
    assert len(error["message"]) < 600
    assert answer.headers["x-request-id"]


async def test_unsupported_requests_are_refused_with_a_reason(it: GatewayHarness) -> None:
    for changes, status, word in BAD_CHATS:
        body = {"model": RUN, "messages": MESSAGES} | changes
        big = len(json.dumps(body)) > app.MAX_BODY_BYTES
        refused(await it.client.post("/v1/chat/completions", json=body), 413 if big else status, "" if big else word)
    for changes, status, word in BAD_TEXTS:
        refused(await it.text(**({"prompt": "hi"} | changes)), status, word)
    for content, headers, status in BAD_BODIES:
        answer = await it.client.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"} | headers
        )
        refused(answer, status)
    refused(await it.text([0x110000]), 400, "token ids")  # which the tokenizer cannot write out
    refused(await it.text([0xFFFF]), 400, "token ids")  # by the engine, which alone knows its vocabulary
    refused(await it.client.get("/v1/chat/completions"), 405)
    refused(await it.client.get("/nowhere"), 404)
    assert not it.engine.requests
    assert (await it.chat()).status_code == 200, "the gateway is none the worse for it"


async def test_request_bodies_are_bounded_in_time_and_without_a_length(it: GatewayHarness) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 4096
            await asyncio.sleep(0)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    for content, status in ((endless(), 413), (slow(), 408)):
        answer = await it.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        refused(answer, status)


async def test_foreign_pages_are_refused(it: GatewayHarness) -> None:
    for headers, status in (
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:8000"}, 421),
        ({"Host": ""}, 421),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "https://ours"}, 200),
    ):
        answer = await it.client.get("/v1/models", headers=headers)
        assert answer.status_code == status, headers
        if status != 200:
            refused(answer, status)
    allowed = await it.client.options(
        "/v1/models", headers={"Origin": "https://ours", "Access-Control-Request-Method": "GET"}
    )
    assert allowed.headers["access-control-allow-origin"] == "https://ours"


async def test_only_holders_of_a_key_are_answered(it: GatewayHarness) -> None:
    for value in ("", "Bearer", "Bearer ", "Bearer wrong", f"Basic {it.key}", it.key, "Bearer \udcff"):
        headers = [(b"authorization", value.encode(errors="surrogateescape"))]
        for path in ("/v1/models", f"/v1/models/{RUN}"):
            answer = await it.client.send(httpx.Request("GET", f"http://localhost{path}", headers=headers))
            refused(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
    twice = [(b"authorization", f"Bearer {it.key}".encode())] * 2
    refused(await it.client.send(httpx.Request("GET", "http://localhost/v1/models", headers=twice)), 400)
    it.gateway.keys.remove("tester")
    refused(await it.chat(), 401)
    open_to_all = {"/health", "/ready", "/openapi.json"}
    for path in open_to_all:
        assert (await it.client.get(path, headers={"Authorization": ""})).status_code == 200


async def test_a_request_keeps_the_name_that_it_came_with(it: GatewayHarness) -> None:
    assert (await it.client.get("/health", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
    for bad in ("a b", "x" * 200):
        assert (await it.client.get("/health", headers={"x-request-id": bad})).headers["x-request-id"] != bad


async def test_limits_are_per_key_and_a_changed_key_file_counts_at_once(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, limits={"requests_per_minute": 2}) as it:
        assert [(await it.chat()).status_code for _ in range(3)] == [200, 200, 429]
        other = KeyFile(tmp_path / "gateway" / "keys.json").make_key("other")
        it.client.headers["Authorization"] = f"Bearer {other}"
        assert (await it.chat()).status_code == 200, "a key made meanwhile counts at once"


def test_limits_fill_up_again_by_the_minute() -> None:
    clock = FakeClock()
    key = ANYONE.model_copy(update={"requests_per_minute": 60, "tokens_per_minute": 600, "concurrent": 2})
    use = KeyUse(key, clock)
    use.enter()
    use.enter()
    with pytest.raises(ApiError, match="2 requests at once"):
        use.enter()
    use.leave(500)
    use.leave(200)
    with pytest.raises(ApiError, match="600 tokens a minute") as told:
        use.enter()
    assert told.value.headers() == {"Retry-After": "11"}  # 101 tokens are missing, 10 come a second
    clock.advance(told.value.retry_after_s or 0)
    use.enter()
    use.leave(0)
    for _ in range(59):
        clock.advance(0.001)
        use.enter()
        use.leave(0)
    with pytest.raises(ApiError, match="60 requests a minute"):
        use.enter()


def test_a_key_is_shown_once(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "gateway" / "keys.json")
    secret = file.make_key("alice", train=True, concurrent=3)
    assert secret not in file.path.read_text()
    assert file.path.stat().st_mode & 0o777 == 0o600
    ring = KeyRing(file)
    assert ring.key_use_of(f"Bearer {secret}").key.name == "alice"
    assert ring.key_use_of(f"bearer {secret}") is ring.key_use_of(f"Bearer {secret}"), "limits are counted once"
    for name in ("alice", "ANYONE", "anyone", "a/b", ""):
        with pytest.raises(UserError):
            file.make_key(name)
    file.remove("alice")
    with pytest.raises(ApiError, match="an unknown one"):
        ring.key_use_of(f"Bearer {secret}")
    with pytest.raises(UserError, match="keys ls"):
        file.remove("alice")
    file.path.write_text("{}")
    with pytest.raises(UserError, match="keys add"):
        file.read()


def test_without_keys_only_this_machine_may_ask() -> None:
    assert not GatewaySettings(require_key=False).require_key
    with pytest.raises(ValidationError, match="require_key"):
        GatewaySettings(require_key=False, host="0.0.0.0")


async def test_without_keys_anyone_is_answered_and_no_answer_is_trained(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, require_key=False) as it:
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer EMPTY"}):
            answer = await it.client.post("/v1/completions", json={"model": RUN, "prompt": "a"}, headers=headers)
            assert (answer.status_code, answer.headers["x-streamrl-feedback"]) == (200, "none")


async def test_secrets_are_in_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(failures=3, fail_at=2)
    async with running_gateway(tmp_path, engines=[engine]) as it:
        refused(await it.chat("my private question"), 502)
        await it.chat("my private question", stream=True)
        refused(await it.client.get("/v1/models", headers={"Authorization": "Bearer sk-wrong"}), 401)
        key = it.key
    said = capsys.readouterr().out
    assert "gateway ready" in said
    assert not [word for word in (key, "sk-wrong", "secret-of-the-run", "private question") if word in said]


async def test_an_internal_error_is_reported_without_details(tmp_path: Path) -> None:
    class Broken(CharacterTokenizer):
        def encode_text(self, text: str) -> list[int]:
            raise RuntimeError("inside knowledge")

    async with running_gateway(tmp_path, tokenizer=Broken()) as it:
        transport = httpx.ASGITransport(app=it.gateway.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, headers=it.client.headers) as client:
            answer = await client.post("http://localhost/v1/completions", json={"model": RUN, "prompt": "a"})
        refused(answer, 500)
        assert "inside" not in answer.text
