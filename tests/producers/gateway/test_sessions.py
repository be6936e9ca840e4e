import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from streamrl.producers.gateway.ended_sessions import EndedSessions
from streamrl.producers.gateway.feedback import FeedbackStore
from streamrl.producers.gateway.refusals import ApiError
from streamrl.producers.gateway.requests import SessionGroup
from streamrl.producers.gateway.sessions import SessionBook, tokens_added_after
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Trajectory
from tests.fakes.clock import FakeClock
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import (
    EOS,
    RUN,
    CharacterTokenizer,
    GatewayHarness,
    ScriptedEngine,
    running_gateway,
)
from tests.schemas.examples import trajectory

SESSION = {"x-session-id": "s1"}
CALL = '<tool_call>{"name":"add",  "arguments":{"a":1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class TurnTokenizer(CharacterTokenizer):
    """Its template ends each turn as a completion ends, opens the answer, and writes tool calls in a way of its own."""

    def encode_chat(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        found = list[int]()
        for turn in turns:
            calls = "".join(json.dumps(one["function"]) for one in turn.get("tool_calls", ()))
            found += [*map(ord, f"{turn['role'][0]}:{turn['content']}{calls}"), EOS]
        return [*found, *map(ord, "a:")]


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    engine = ScriptedEngine(says={"again": "dos", "t:2": "so 2", "u:go": CALL, "u:one": "uno"})
    async with running_gateway(tmp_path, engines=[engine], tokenizer=TurnTokenizer(), longest=256) as made:
        yield made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def chat(it: GatewayHarness, messages: list[Any], session: str = "s1", **fields: Any) -> httpx.Response:
    body = {"model": RUN, "messages": messages} | fields
    return await it.client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})


async def end(it: GatewayHarness, session: str = "s1", reward: float = 1.0, **fields: Any) -> httpx.Response:
    return await it.client.post("/v1/feedback", json={"session": session, "reward": reward} | fields)


async def delivered(it: GatewayHarness, count: int = 1) -> list[Trajectory]:
    await until(lambda: len(it.trajectories) >= count)
    return sorted(it.trajectories, key=lambda one: one.trajectory_id)


async def test_sampled_tokens_are_never_tokenised_again_and_only_sampled_tokens_are_trained(
    it: GatewayHarness,
) -> None:
    first = await chat(it, [user("go")], tools=TOOLS)
    assert first.headers.get("x-streamrl-session") == "new", first.text
    message = first.json()["choices"][0]["message"]
    it.engine.version = PolicyVersion(1, 3)
    told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    second = await chat(it, [user("go"), message, told], tools=TOOLS)
    assert second.headers["x-streamrl-session"] == "continued"
    assert second.json()["choices"][0]["message"]["content"] == "so 2"
    turn = await it.client.post("/v1/feedback", json={"id": first.json()["id"], "reward": 0.25})
    assert turn.json()["status"] == "open"
    other = await it.client.post("/v1/feedback", json={"id": first.json()["id"], "reward": 0.5})
    assert other.status_code == 409
    assert (await end(it)).json() == {
        "session": "s1",
        "object": "feedback",
        "status": "complete",
        "rewards": [1.0],
        "trained_as": "policy",
    }
    (made,) = await delivered(it)
    one, two = it.engine.requests
    # sampled_tokens_are_never_tokenised_again: the second request's prompt is what the first one read and sampled.
    sampled = [*map(ord, CALL), EOS]
    assert list(two.prompt_token_ids) == [*one.prompt_token_ids, *sampled, *map(ord, "t:2"), EOS, *map(ord, "a:")]
    assert made.prompt_token_ids.tolist() == list(one.prompt_token_ids)
    assert [*one.prompt_token_ids, *made.token_ids] == [*two.prompt_token_ids, *map(ord, "so 2"), EOS]
    read = len(two.prompt_token_ids) - len(one.prompt_token_ids) - len(sampled)
    # only_sampled_tokens_are_trained
    assert made.loss_mask.tolist() == [1] * len(sampled) + [0] * read + [1] * 5
    assert np.array_equal(made.logprobs != 0, made.loss_mask == 1)
    assert [(turn.start, turn.end, turn.rewards) for turn in made.turns] == [
        (0, len(sampled), {"feedback": 0.25}),
        (len(sampled) + read, len(made.token_ids), {}),
    ]
    assert [(span.version.number, span.start) for span in made.version_spans] == [(0, 0), (3, len(sampled))]
    assert (made.rewards, made.session, made.num_generations) == ({"feedback": 1.25}, "s1", 1)
    assert made.sampled_tokens == len(sampled) + 5
    (record,) = [record for log in it.bus.log(f"{RUN}.trajectories").partitions for record in log]
    assert ("turns", b"2") in record.headers


async def test_a_rewritten_history_splits_the_trajectory_and_says_so(it: GatewayHarness) -> None:
    await chat(it, [user("one")])
    again = await chat(it, [user("one"), {"role": "assistant", "content": "UNO"}, user("again")])
    assert again.headers["x-streamrl-session"] == "split"
    on = await chat(
        it,
        [user("one"), {"role": "assistant", "content": "UNO"}, user("again"), {"role": "assistant", "content": "dos"}],
    )
    assert on.headers["x-streamrl-session"] == "continued"
    assert (await end(it, reward=0.5)).status_code == 200
    first, second = await delivered(it, 2)
    assert [len(one.turns) for one in (first, second)] == [1, 2]
    assert first.group_id == second.group_id
    assert {one.rewards["feedback"] for one in (first, second)} == {0.5}
    assert {one.num_generations for one in (first, second)} == {2}


async def test_a_program_that_knows_an_address_only_is_a_session_of_texts(it: GatewayHarness) -> None:
    import openai  # takes a second, in every process that collects tests

    address = f"{it.gateway.address}/sessions/agent-7/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key=it.key, max_retries=0) as client:
        said = await client.completions.create(model=RUN, prompt="u:one", max_tokens=8)
        prompt = f"u:one{said.choices[0].text}\nagain"
        stream = await client.completions.create(model=RUN, prompt=prompt, max_tokens=8, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "dos"
    await end(it, "agent-7")
    (made,) = await delivered(it)
    # The token that ended the first turn was sampled, and stays.
    assert made.completion_text == "uno<eos>\nagaindos<eos>"
    assert made.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


async def test_sessions_at_one_task_are_a_group(it: GatewayHarness) -> None:
    group = {"id": "task-1", "size": 2}
    for number in range(2):
        await chat(it, [user("one")], f"g{number}")
        answer = await end(it, f"g{number}", float(number), group=group, dataset="game")
        assert answer.json()["status"] == ("open", "complete")[number]
    assert (await end(it, "g1", 1.0, group=group)).json()["status"] == "complete", "told twice"
    assert (await end(it, "g1", 0.0, group=group)).status_code == 409
    await chat(it, [user("one")], "g2")
    both = await asyncio.gather(*(end(it, "g2", 0.5, group={"id": "other", "size": 1}) for _ in range(2)))
    assert [answer.status_code for answer in both] == [200, 200]
    await until(lambda: len(it.trajectories) == 3)
    first, second = (one for one in await delivered(it, 3) if one.session != "g2")
    assert (first.group_id, first.sample_index, second.sample_index) == (second.group_id, 0, 1)
    assert (first.dataset, first.num_generations, second.rewards) == ("game", 2, {"feedback": 1.0})


async def test_invalid_session_requests_are_refused(it: GatewayHarness) -> None:
    assert (await end(it, "nobody")).status_code == 404
    assert (await end(it, "a/b")).status_code == 400
    assert (await chat(it, [user("one")], "a/b")).status_code == 400
    assert (await chat(it, [user("one")], n=2)).status_code == 400
    greedy = await chat(it, [user("one")], temperature=0)
    assert "x-streamrl-session" not in greedy.headers
    await chat(it, [user("one")], "s2", store=False)
    assert (await end(it, "s2")).status_code == 404
    for wrong in ({"id": "x"}, {"rewards": [1.0]}, {"choice": 1}):
        assert (await end(it, "s1", **wrong)).status_code == 400
    it.gateway.desk.store.lone_refusal = "grpo compares"
    await chat(it, [user("one")])
    alone = await end(it)
    assert alone.status_code == 400
    assert "grpo compares" in alone.json()["error"]["message"]


class PairTokenizer(CharacterTokenizer):
    """Writes ``ab`` and ``cd`` as one token each where it can."""

    PAIRS = {300: "ab", 301: "cd"}

    def encode_text(self, text: str) -> list[int]:
        for token, pair in self.PAIRS.items():
            text = text.replace(pair, chr(token))
        return [*map(ord, text)]

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        return "".join(self.PAIRS.get(token) or ("<eos>" if token == EOS else chr(token)) for token in token_ids)


@pytest.mark.parametrize(
    ("known", "prompt", "inserted"),
    [
        ("xy", "xyab", "ab"),
        (["a", "b"], "abx", "x"),
        (["x", "a", "b"], "xabcdy", "cdy"),
        (["a", "b", "c"], "abcd!", "d!"),
        (["a", "b", EOS], "abz", "z"),
        ("xy", "xz", None),
        ("xyz", "xy", None),
        (["a", EOS, "b", EOS], "abz", "z"),
        (["a", EOS, "b", EOS], "a<eos>bz", "z"),
    ],
)
def test_a_prompt_is_compared_with_what_was_sampled(known: Any, prompt: str, inserted: str | None) -> None:
    tokenizer = PairTokenizer()
    tokens = [one if isinstance(one, int) else ord(one) for one in known]
    ends = [place for place, token in enumerate(tokens) if token == EOS]
    found = tokens_added_after(tokenizer, tokens, tokenizer.encode_text(prompt), ends)
    assert found == (None if inserted is None else tokenizer.encode_text(inserted))


async def test_sessions_are_bounded(tmp_path: Path) -> None:
    clock = FakeClock()
    book = SessionBook(CharacterTokenizer(), timeout_s=10, max_open=2, clock=clock)
    for name in "abc":
        book.of("k", name)
        clock.advance(1)
    assert (len(book), book.counts.dropped) == (2, 1)
    clock.advance(8.5)
    book.sweep()
    assert (len(book), book.counts.dropped) == (1, 2)
    assert book.ended("k", "a", 1.0, "d", None) is None  # type: ignore[arg-type]


def ended(store: FeedbackStore, name: str, group: SessionGroup | None) -> dict[str, Any]:
    return store.sessions.end("k", name, 1.0, group, (f"id-{name}", [trajectory(session=name)]))


def test_a_group_that_is_not_whole_in_time_is_those_that_came(tmp_path: Path) -> None:
    clock = FakeClock()
    store = FeedbackStore(tmp_path / "f.sqlite", timeout_s=100, max_kept=9, clock=clock)
    store.open()
    for name, group, size in (("a", "g", 3), ("b", "g", 3), ("c", "h", 2)):
        assert ended(store, name, SessionGroup(id=group, size=size))["status"] == "open"
        clock.advance(1)
    with pytest.raises(ApiError, match="group size 3"):
        ended(store, "d", SessionGroup(id="g", size=4))
    assert not store.rewarded()
    clock.advance(101)
    store.sessions.lone_refusal = "one alone teaches nothing"
    store.sweep()
    (found,) = store.rewarded()
    assert [one.session for one in found.trajectories] == ["a", "b"]
    assert [one.num_generations for one in found.trajectories] == [2, 2]
    assert store.counts.expired == 1
    assert store.rewarded()[0].trajectories == found.trajectories, "under the same names each time"
    found.note_delivered()
    assert not store.rewarded()
    assert isinstance(store.sessions, EndedSessions)
    store.close()
