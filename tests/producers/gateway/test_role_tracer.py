"""A gateway's requests and what became of them, in one trace: through a real gateway on a bus in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.port import Record
from streamrl.observability.interceptor import observed
from streamrl.observability.tracing.context import LoggedTraces, SpanContext, TraceSpan, context_of
from streamrl.observability.tracing.role_tracers import tracing_of
from streamrl.observability.tracing.worker_tracer import TracedEngine, WorkerTracer
from streamrl.producers.gateway.gateway import GatewayObservers
from streamrl.producers.gateway.role_tracer import GatewayTracer
from streamrl.producers.generation.engines.port import GenerationRequest, TokenDelta
from streamrl.schemas.topics import TRAJECTORIES
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import RUN, GatewayHarness, ScriptedEngine, running_gateway


@pytest.fixture
def spans() -> list[TraceSpan]:
    return []


@pytest.fixture
async def it(tmp_path: Path, spans: list[TraceSpan]) -> AsyncIterator[GatewayHarness]:
    tracing = tracing_of("gateway", "gateway", RUN, 1.0, spans.append, LoggedTraces(), GatewayTracer)
    assert tracing is not None
    tracer = tracing.tracer
    assert isinstance(tracer, GatewayTracer)

    async with running_gateway(
        tmp_path,
        longest=256,
        observers=GatewayObservers(calls=tracer),
        around=lambda bus: observed(bus, tracing.observer),
    ) as made:
        yield made


async def turn(it: GatewayHarness, prompt: str) -> dict[str, Any]:
    body = {"model": RUN, "prompt": prompt}
    answer = await it.client.post("/v1/completions", json=body, headers={"x-session-id": "s1"})
    found: dict[str, Any] = answer.json()
    return found


def published(it: GatewayHarness) -> list[Record]:
    return [record for partition in it.bus.log(TRAJECTORIES.full_name(RUN)).partitions for record in partition]


async def test_calls_of_a_session_and_its_trajectory_are_one_trace(it: GatewayHarness, spans: list[TraceSpan]) -> None:
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


async def test_rewards_join_the_trace_of_their_request_and_no_other(it: GatewayHarness, spans: list[TraceSpan]) -> None:
    asked = (await it.text("hello")).json()
    other = (await it.text("hello")).json()
    await it.client.post("/v1/feedback", json={"id": asked["id"], "reward": 1.0})
    await until(lambda: len(spans) == 4)
    by_call = {span.attributes.get("streamrl.call_id"): span.context.trace_id for span in spans[:2]}
    assert len(set(by_call.values())) == 2
    assert {span.context.trace_id for span in spans[2:]} == {by_call[asked["id"]]} != {by_call[other["id"]]}


async def test_a_requester_that_left_has_a_span_that_says_so(it: GatewayHarness, spans: list[TraceSpan]) -> None:
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


CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"


async def test_a_call_links_to_the_span_of_its_requester(it: GatewayHarness, spans: list[TraceSpan]) -> None:
    body = {"model": RUN, "prompt": "hello"}
    for caller in (f"{CALLER}1", f"{CALLER}0", "nonsense", ""):
        await it.client.post("/v1/completions", json=body, headers={"traceparent": caller} if caller else {})
    known = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    assert [[*span.links] for span in spans] == [[known], [], [], []], "one that is not sampled is nowhere to be found"
    assert all(span.parent is None and span.context.trace_id != known.trace_id for span in spans)


class TracedScript(ScriptedEngine):
    """A scripted engine as a traced worker uses it."""

    def __init__(self, spans: list[TraceSpan]) -> None:
        super().__init__()
        self._traced = TracedEngine(ScriptedEngine(), WorkerTracer(RUN, "w0", spans.append, LoggedTraces()))

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        return self._traced.generate(request)


async def test_spans_of_generation_are_below_their_calls(tmp_path: Path, spans: list[TraceSpan]) -> None:
    tracing = tracing_of("gateway", "gateway", RUN, 1.0, spans.append, LoggedTraces(), GatewayTracer)
    assert tracing is not None
    tracer = tracing.tracer
    assert isinstance(tracer, GatewayTracer)

    async with running_gateway(tmp_path, engines=[TracedScript(spans)], observers=GatewayObservers(calls=tracer)) as it:
        await it.text("hello", n=2)
        first = await turn(it, "go")
        await turn(it, "go" + first["choices"][0]["text"] + "on")
        await until(lambda: len(spans) == 7)
    requests = [span for span in spans if span.name == "request"]
    generated = [span for span in spans if span.name == "generate"]
    assert [span.parent for span in generated] == [requests[number].context for number in (0, 0, 1, 2)]
    assert len({span.context for span in spans}) == 7
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in generated[:2]] == [6, 6]
    assert {span.attributes["streamrl.worker_id"] for span in generated} == {"w0"}
    assert not any(span.problem or span.links for span in spans)


async def test_no_request_is_traced_where_none_is_sampled(tmp_path: Path) -> None:
    spans = list[TraceSpan]()
    tracing = tracing_of("gateway", "gateway", RUN, 0.0, spans.append, LoggedTraces(), GatewayTracer)
    assert tracing is not None
    tracer = tracing.tracer
    assert isinstance(tracer, GatewayTracer)

    async with running_gateway(
        tmp_path, observers=GatewayObservers(calls=tracer), around=lambda bus: observed(bus, tracing.observer)
    ) as it:
        asked = (await it.text("hello")).json()
        await it.client.post("/v1/feedback", json={"id": asked["id"], "reward": 1.0})
        await until(lambda: len(published(it)) == 1)
        assert spans == []
        assert context_of(published(it)[0].headers) is None
