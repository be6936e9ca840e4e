import pytest

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.tracing.context import LoggedTraces, SpanContext, TraceSpan
from streamrl.observability.tracing.observer import StoredRecord
from streamrl.observability.tracing.role_tracers import TrainerTracer
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord, StepReport
from tests.schemas.examples import examples

CONTEXT = SpanContext(7, 9)
GROUP = "gsm8k/7/0"


@pytest.fixture
def spans() -> list[TraceSpan]:
    return []


@pytest.fixture
def tracer(spans: list[TraceSpan]) -> TrainerTracer:
    tracer = TrainerTracer("r", spans.append, LoggedTraces(), clock=lambda: 100.0)
    for offset in (10, 11):
        tracer.received(Record("r.trajectories", 1, offset, GROUP, b"", (), 0.0), SpanContext(7, offset))
    return tracer


def send(tracer: TrainerTracer, record: Outgoing) -> SpanContext | None:
    trace = tracer.sending(record)
    if trace is None:
        return None
    trace.on_stored(StoredRecord(record.topic, 0, 5, 101.0, 102.0))
    return trace.context


def step(**changes: object) -> Outgoing:
    return Outgoing.of("r.steps", examples()["step-report"].replace(**changes), key="grpo")


def skip(offset: int) -> Outgoing:
    row = examples()["skip"]
    assert isinstance(row, SkipRecord)
    changes = {"partition": 1, "offset": offset, "trajectory_id": f"{GROUP}/1", "reason": SkipReason.STALE}
    return Outgoing.of("r.skips", row.replace(**changes), key=None)


def test_a_step_that_is_announced_again_has_its_spans_once(tracer: TrainerTracer, spans: list[TraceSpan]) -> None:
    assert send(tracer, step()) is not None
    assert [span.name for span in spans] == ["train", "train", "optimizer step"]
    assert len(spans[-1].links) == 1, "one link for the group"
    assert send(tracer, step()) is None
    assert len(spans) == 3


def test_a_step_without_traced_trajectories_has_no_trace(tracer: TrainerTracer, spans: list[TraceSpan]) -> None:
    assert send(tracer, step(micro_batches=((RecordRef("other/0/0/0", 3, 3),),))) is None
    assert send(tracer, step(micro_batches=(), group_ids=())) is None
    assert spans == []


def test_the_span_of_a_step_has_its_length_and_its_phases(tracer: TrainerTracer, spans: list[TraceSpan]) -> None:
    metrics = {"time/step": 2.0, "time/forward_backward": 1.5, "reward": 0.5, "kafka/pending_bytes": 9.0}
    send(tracer, step(metrics=metrics))
    report = examples()["step-report"]
    assert isinstance(report, StepReport)
    assert spans[-1].start_s == report.sent_at - 2.0
    found = {name for name in spans[-1].attributes if name.startswith("streamrl.metric.")}
    assert found == {f"streamrl.metric.{name}" for name in metrics if name != "kafka/pending_bytes"}


def test_a_skipped_trajectory_ends_its_trace_with_the_reason(tracer: TrainerTracer, spans: list[TraceSpan]) -> None:
    assert send(tracer, skip(11)) is None, "skip rows carry no context"
    assert send(tracer, skip(11)) is None
    (span,) = spans
    assert (span.name, span.parent, span.attributes["streamrl.skip.reason"]) == ("skip", SpanContext(7, 11), "stale")
    send(tracer, step())
    assert [one.name for one in spans[1:]] == ["train", "optimizer step"], "a skipped record is not trained as well"


def test_a_dead_letter_has_a_span_in_the_trace_of_its_record(tracer: TrainerTracer, spans: list[TraceSpan]) -> None:
    headers = (*CONTEXT.headers, ("dlq-error-class", b"MalformedFrame"), ("dlq-error", b"cut short"))
    send(tracer, Outgoing("r.dead-letters", b"?", None, 0, headers))
    send(tracer, Outgoing("r.dead-letters", b"?", None, 0, headers[1:]))
    (span,) = spans
    assert (span.parent, span.problem) == (CONTEXT, "MalformedFrame: cut short")
