import io
import itertools
from contextlib import redirect_stdout

import pytest
import structlog
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streamrl.deploy.wiring.process import configure_logging
from streamrl.observability.tracing.context import (
    LoggedTraces,
    SpanContext,
    context_of,
    is_sampled,
    span_id_of,
    trace_id_of,
)

CONTEXT = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)


def test_a_header_is_readable_text_that_opentelemetry_understands() -> None:
    ((name, value),) = CONTEXT.headers
    assert (name, value) == ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    around = TraceContextTextMapPropagator().extract({name: value.decode()})
    found = get_current_span(around).get_span_context()
    assert (found.trace_id, found.span_id, found.trace_flags.sampled) == (*CONTEXT, True)
    assert context_of((("schema", b"x"), *CONTEXT.headers)) == CONTEXT


@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        (b"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-later", True),
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", False),
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", False),
        (b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", False),
        (b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", False),
        (b"00-00000000000000000000000000000000-00f067aa0ba902b7-01", False),
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", False),
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736", False),
        (b"\xff\x00" * 1000, False),
        (b"", False),
    ],
)
def test_only_sampled_well_formed_contexts_are_read(value: bytes, *, is_read: bool) -> None:
    assert context_of((("traceparent", value),)) == (CONTEXT if is_read else None)


def test_the_same_work_has_the_same_ids() -> None:
    assert trace_id_of("run", "a/0/0", 1.5) == trace_id_of("run", "a/0/0", 1.5)
    assert span_id_of("a/0/0/1", 0, "send") == span_id_of("a/0/0/1", 0, "send")
    names = list(itertools.product(("run", "r"), ("a/0", "a"), (0, 1)))
    assert len({trace_id_of(*each) for each in names}) == len({span_id_of(*each) for each in names}) == len(names)


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.5, 1.0])
def test_all_processes_agree_on_what_is_sampled(ratio: float) -> None:
    """Also a process that asks OpenTelemetry's own sampler."""
    theirs, ids = TraceIdRatioBased(ratio), [trace_id_of("run", number) for number in range(4000)]
    ours = [is_sampled(each, ratio) for each in ids]
    assert ours == [theirs.should_sample(None, each, "dispatch").decision is Decision.RECORD_AND_SAMPLE for each in ids]
    assert sum(ours) / len(ids) == pytest.approx(ratio, abs=0.03)


def test_lines_on_a_traced_group_or_trajectory_name_the_trace() -> None:
    logged, output = LoggedTraces(), io.StringIO()
    with redirect_stdout(output):
        configure_logging({"run": "demo", "process": "worker-1", "worker": "worker-1"}, logged)
        log = structlog.get_logger()
        log.info("before", group="a/0/0")
        logged.add("a/0/0", SpanContext(0xABC, 1))
        log.info("of group", group="a/0/0")
        with structlog.contextvars.bound_contextvars(trajectory="a/0/0/3"):
            log.info("of trajectory")
        log.info("of another", trajectory="a/1/0/3")
    structlog.reset_defaults()
    before, of_group, of_trajectory, of_another = output.getvalue().splitlines()
    assert "trace_id" not in before
    assert "trace_id" not in of_another
    for line in (of_group, of_trajectory):
        assert f"trace_id={0xABC:032x}" in line
    for part in ("run=demo", "worker=worker-1", "trajectory=a/0/0/3"):
        assert part in of_trajectory
