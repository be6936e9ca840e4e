from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.tracing.context import LoggedTraces, SpanContext, TraceSpan
from streamrl.observability.tracing.observer import StoredRecord
from streamrl.observability.tracing.worker_tracer import TracedEngine, WorkerTracer
from streamrl.producers.generation.engines.port import GenerationRequest
from streamrl.schemas.control import ArmWeights
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import SamplingParams
from streamrl.schemas.weights import MANIFEST
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.schemas.examples import examples, trajectory

GROUP, NAME, VERSION = "gsm8k/7/0", "gsm8k/7/0/3", PolicyVersion(2, 4)


@pytest.fixture
def spans() -> list[TraceSpan]:
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tracer(spans: list[TraceSpan], clock: FakeClock) -> WorkerTracer:
    tracer = WorkerTracer("r", "worker-1", spans.append, LoggedTraces(), clock)
    tracer.received(Record("r.work-orders", 3, 0, GROUP, b"", (), 0.0), SpanContext(7, 9))
    return tracer


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, [1], SamplingParams(max_completion_length=8))


async def test_an_engine_that_is_left_early_frees_its_slot(tracer: WorkerTracer) -> None:
    fake = FakeEngine(version=VERSION, started=True)
    async with aclosing(TracedEngine(fake, tracer).generate(request(NAME))) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            break
    assert (fake.running, fake.left_early) == (0, 1)


async def test_a_request_outside_of_all_traces_goes_to_the_engine_itself(tracer: WorkerTracer) -> None:
    fake = FakeEngine(version=VERSION, started=True)
    deltas = TracedEngine(fake, tracer).generate(request("other/0/0/0"))
    assert type(deltas) is type(fake.generate(request("other/0/0/0")))
    assert getattr(deltas, "__qualname__", "") == "FakeEngine.generate"


async def test_a_request_that_was_given_up_has_a_span_that_says_so(
    tracer: WorkerTracer, spans: list[TraceSpan]
) -> None:
    fake = FakeEngine(version=VERSION, started=True)
    asked = replace(request("request/1"), traceparent=SpanContext(7, 9).traceparent)
    async with aclosing(TracedEngine(fake, tracer).generate(asked)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            break
    assert fake.left_early == 1
    (span,) = spans
    assert (span.name, span.parent, span.context.trace_id) == ("generate", SpanContext(7, 9), 7)
    assert "the requester left" in span.problem
    assert span.attributes["streamrl.policy.versions"] == [str(VERSION)]


def test_a_trajectory_that_was_never_generated_has_no_span_of_a_generation(
    tracer: WorkerTracer, spans: list[TraceSpan]
) -> None:
    trace = tracer.sending(Outgoing.of("r.trajectories", trajectory(0), key=GROUP, partition=0))
    assert trace is not None
    trace.on_stored(StoredRecord("r.trajectories", 0, 1, 1.0, 2.0))
    assert [span.name for span in spans] == ["sample", "send trajectories"]
    assert trace.context == spans[1].context


def published(directory: Path, content: str = "{}") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / MANIFEST).write_text(content)
    return directory


def announce(tracer: WorkerTracer, weights: Message, directory: Path, context: SpanContext) -> None:
    message = weights.replace(manifest_sha256=sha256_of(directory / MANIFEST))
    out = Outgoing.of("r.control", message, key="weights")
    tracer.received(Record("r.control", 0, 0, out.key, out.value, out.headers, 0.0), context)


async def test_weights_that_the_engine_refuses_have_no_span(
    tracer: WorkerTracer, spans: list[TraceSpan], tmp_path: Path
) -> None:
    announce(tracer, examples()["control-weights-ready"], published(tmp_path), SpanContext(5, 6))
    fake = FakeEngine(refuse={VERSION})
    engine = TracedEngine(fake, tracer)
    with pytest.raises(WeightsError):
        await engine.adopt(tmp_path, VERSION)
    assert spans == []
    fake.refuse.clear()
    await engine.adopt(tmp_path, VERSION)
    assert [(span.name, span.parent) for span in spans] == [
        ("fetch weights", SpanContext(5, 6)),
        ("adopt weights", SpanContext(5, 6)),
    ]


async def test_two_policies_weights_of_one_number_are_not_taken_for_each_other(
    tracer: WorkerTracer, spans: list[TraceSpan], tmp_path: Path
) -> None:
    of_arm, served = published(tmp_path / "arm", "rloo"), published(tmp_path / "served", "grpo")
    announce(tracer, examples()["control-weights-ready"], served, SpanContext(5, 6))
    engine = TracedEngine(FakeEngine(), tracer)
    await engine.adopt(of_arm, VERSION)
    assert spans == [], "the served policy's were not taken up, and the arm's belong to no trace"
    arms: ArmWeights = examples()["control-arm-weights"].replace(version=VERSION)  # type: ignore[assignment]
    announce(tracer, arms, of_arm, SpanContext(7, 8))
    for directory in (served, of_arm):
        await engine.adopt(directory, VERSION)
    found = [(span.name, span.parent, span.attributes["streamrl.policy.version"]) for span in spans]
    assert found == [
        ("fetch weights", SpanContext(5, 6), "2-4"),
        ("adopt weights", SpanContext(5, 6), "2-4"),
        ("fetch weights", SpanContext(7, 8), f"{arms.policy}/2-4"),
        ("adopt weights", SpanContext(7, 8), f"{arms.policy}/2-4"),
    ]


def test_a_trajectory_that_is_sent_again_carries_the_same_context_and_has_its_spans_once(
    tracer: WorkerTracer, spans: list[TraceSpan]
) -> None:
    record = Outgoing.of("r.trajectories", trajectory(), key=GROUP, partition=0)
    first, second = tracer.sending(record), tracer.sending(record)
    assert first is not None
    assert second is not None
    assert first.context == second.context
    second.on_stored(StoredRecord("r.trajectories", 0, 1, 1.0, 2.0))
    assert [span.name for span in spans] == ["sample", "send trajectories"]
