"""A gateway's requests and what became of them, in one trace: through a real gateway on a bus in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bus.port import Record
from observability.interceptor import observed
from observability.tracing.context import LoggedTraces, TraceSpan, context_of
from observability.tracing.role_tracers import tracing_of
from producers.gateway.gateway import Gateway
from schemas.topics import TRAJECTORIES
from tests.fakes.waiting import until
from tests.producers.gateway.stage import RUN, Stage, stage


@pytest.fixture
def spans() -> list[TraceSpan]:
    return []


@pytest.fixture
async def it(tmp_path: Path, spans: list[TraceSpan]) -> AsyncIterator[Stage]:
    tracing = tracing_of("gateway", "gateway", RUN, 1.0, spans.append, LoggedTraces())
    assert tracing is not None
    assert tracing.gateway is not None

    def traced(gateway: Gateway) -> None:
        gateway.bus, gateway.on_call = observed(gateway.bus, tracing.observer), tracing.gateway.answered

    async with stage(tmp_path, longest=256, prepare=traced) as made:
        yield made


async def turn(it: Stage, prompt: str) -> dict[str, Any]:
    body = {"model": RUN, "prompt": prompt}
    answer = await it.client.post("/v1/completions", json=body, headers={"x-session-id": "s1"})
    found: dict[str, Any] = answer.json()
    return found


def published(it: Stage) -> list[Record]:
    return [record for partition in it.bus.log(TRAJECTORIES.full_name(RUN)).partitions for record in partition]


async def test_calls_of_a_session_and_its_trajectory_are_one_trace(it: Stage, spans: list[TraceSpan]) -> None:
    first = await turn(it, "go")
    second = await turn(it, "go" + first["choices"][0]["text"] + "on")
    await it.client.post("/v1/feedback", json={"session": "s1", "reward": 0.5})
    await until(lambda: len(spans) == 4)
    requests, (feedback, sent) = spans[:2], spans[2:]
    assert [span.name for span in spans] == ["request", "request", "feedback", "send trajectories"]
    assert [span.attributes["streamrl.call_id"] for span in requests] == [first["id"], second["id"]]
    root = requests[0].context
    assert [span.parent for span in spans] == [None, root, root, feedback.context]
    assert len({span.context for span in spans}) == 4
    assert {span.context.trace_id for span in spans} == {root.trace_id}
    assert requests[1].attributes["gen_ai.usage.output_tokens"] == second["usage"]["completion_tokens"]
    assert (feedback.attributes["streamrl.turns"], feedback.attributes["streamrl.reward.feedback"]) == (2, 0.5)
    assert all(span.start_s <= span.end_s for span in spans)
    assert feedback.start_s >= requests[1].start_s
    (record,) = published(it)
    assert context_of(record.headers) == sent.context, "whoever trains it goes on in this trace"


async def test_a_lone_call_s_trajectory_is_in_its_trace_and_another_s_is_not(it: Stage, spans: list[TraceSpan]) -> None:
    asked = (await it.text("hello")).json()
    other = (await it.text("hello")).json()
    await it.client.post("/v1/feedback", json={"id": asked["id"], "reward": 1.0})
    await until(lambda: len(spans) == 4)
    by_call = {span.attributes.get("streamrl.call_id"): span.context.trace_id for span in spans[:2]}
    assert len(set(by_call.values())) == 2
    assert {span.context.trace_id for span in spans[2:]} == {by_call[asked["id"]]} != {by_call[other["id"]]}


async def test_a_requester_that_left_has_a_span_that_says_so(it: Stage, spans: list[TraceSpan]) -> None:
    it.engine.hold_at = 2
    gone = asyncio.Event()

    async def send(_message: Any) -> None: ...

    body = b'{"model": "%s", "prompt": "hello"}' % RUN.encode()
    asking = asyncio.create_task(it.ask("/v1/completions", body, send, gone))
    await until(lambda: it.engine.running == 1)
    gone.set()
    await asking
    (span,) = spans
    assert "left" in span.problem


async def test_no_request_is_traced_where_none_is_sampled(tmp_path: Path) -> None:
    spans = list[TraceSpan]()
    tracing = tracing_of("gateway", "gateway", RUN, 0.0, spans.append, LoggedTraces())
    assert tracing is not None
    assert tracing.gateway is not None

    def traced(gateway: Gateway) -> None:
        gateway.bus, gateway.on_call = observed(gateway.bus, tracing.observer), tracing.gateway.answered

    async with stage(tmp_path, prepare=traced) as it:
        asked = (await it.text("hello")).json()
        await it.client.post("/v1/feedback", json={"id": asked["id"], "reward": 1.0})
        await until(lambda: len(published(it)) == 1)
        assert spans == []
        assert context_of(published(it)[0].headers) is None
