"""Passes spans to OpenTelemetry's SDK, which exports them from its own thread. Knows no role and no topic.

Spans have ended when they get here, so the SDK's tracers, which build spans step by step, are not used.

Invariants, each with a test of its name:
- exporting_never_waits: a span goes into a bounded queue; if the queue is full, the oldest span is lost and counted;
- an_unreachable_collector_is_one_warning, and the process's exit takes at most ``END_S`` longer.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, TraceFlags
from opentelemetry.trace import SpanContext as SdkSpanContext
from opentelemetry.trace.status import Status, StatusCode

from streamrl.observability.tracing.context import SpanContext, TraceSpan
from streamrl.observability.tracing.settings import TelemetrySettings

log = structlog.get_logger()

QUEUE, BATCH, EVERY_MS = 16_384, 512, 1000
"""Most spans in the queue, spans per request, and milliseconds between requests. The queue is eight times the SDK's
default, because a step ends the spans of thousands of trajectories at once."""
TIMEOUT_S, END_S = 5.0, 5.0
"""Longest wait for one request, and for all at the end: a supervisor kills a process after 20 s."""
KINDS = {"internal": SpanKind.INTERNAL, "producer": SpanKind.PRODUCER, "consumer": SpanKind.CONSUMER}
_SAMPLED, _UNSET = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)


def open_exporting(settings: TelemetrySettings, run_path: Path, role: str, process: str) -> "Exporting":
    """The export that the settings ask for: to ``<run>/traces/<process>.jsonl``, or to a collector."""
    if settings.traces == "file":
        path = run_path / "traces" / f"{process}.jsonl"
        return Exporting(FileExporter(path), str(path), run_path.name, role, process)
    # imported here: with traces in files, neither this package nor its HTTP client is needed
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # OpenTelemetry's own environment variables name the collector
    return Exporting(OTLPSpanExporter(timeout=TIMEOUT_S), "OTLP", run_path.name, role, process)


class Exporting:
    """Exports spans. Call it only on the event loop's thread. ``target``: the destination, for messages."""

    def __init__(self, exporter: SpanExporter, target: str, run: str, role: str, process: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the one warning is ours
        self._counted = _Counted(exporter, target)
        self._processor = BatchSpanProcessor(self._counted, QUEUE, EVERY_MS, BATCH)
        self._scope = InstrumentationScope("streamrl")
        self._resource = Resource.create(
            {
                "service.name": f"streamrl-{role}",
                "service.instance.id": process,
                "service.version": metadata.version("streamrl"),
                "streamrl.run": run,
            }
        )
        self._taken = 0

    @property
    def lost(self) -> int:
        """Number of spans taken and not delivered; before ``close``, some may still be under way."""
        return self._taken - self._counted.delivered

    def record(self, span: TraceSpan) -> None:
        """Take a span; never waits."""
        self._taken += 1  # only on the event loop's thread, so no lock is needed
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_sdk(span.context),
                parent=None if span.parent is None else _sdk(span.parent),
                resource=self._resource,
                attributes=dict(span.attributes),
                links=[Link(_sdk(link)) for link in span.links],
                kind=KINDS[span.kind],
                instrumentation_scope=self._scope,
                status=Status(StatusCode.ERROR, span.problem) if span.problem else _UNSET,
                start_time=_nanoseconds(span.start_s),
                end_time=_nanoseconds(max(span.start_s, span.end_s)),
            )
        )

    def close(self) -> None:
        """Export the rest; takes at most ``END_S``, even if the collector does not answer."""
        # the SDK's shutdown waits for the collector without limit; a daemon thread does not delay our exit
        ending = Thread(target=self._processor.shutdown, name="traces-ending", daemon=True)
        ending.start()
        ending.join(END_S)
        log.info("traces ended", spans=self._taken, lost=self.lost, to=self._counted.target)


class _Counted(SpanExporter):
    """Counts delivered spans, and warns once if some are not delivered."""

    def __init__(self, inner: SpanExporter, target: str) -> None:
        self.inner, self.target, self.delivered = inner, target, 0
        self._warned = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        # the SDK would log an error at each batch; its logger is silenced, and the error is logged once here
        try:
            result, why = self.inner.export(spans), "no answer, or a refusal"
        except Exception as error:
            result, why = SpanExportResult.FAILURE, str(error)
        if result is SpanExportResult.SUCCESS:
            self.delivered += len(spans)
        elif not self._warned:
            self._warned = True
            log.warning("traces are not delivered; the process goes on without them", to=self.target, error=why)
        return result

    def shutdown(self) -> None:
        self.inner.shutdown()


def _sdk(context: SpanContext) -> SdkSpanContext:
    return SdkSpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=_SAMPLED)


def _nanoseconds(seconds: float) -> int:
    # to the microsecond: a float of seconds since the epoch is hardly more precise (53 bits, 31 for whole seconds)
    return int(seconds * 1e6) * 1000


class FileExporter(SpanExporter):
    """Writes spans as OTLP-JSON, one batch per line: the format of OpenTelemetry's file exporters and its collector.

    A killed process leaves at most half a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one line.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(_document(spans), separators=(",", ":")) + "\n")
        return SpanExportResult.SUCCESS


def _document(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """A batch as OTLP-JSON. All its spans are from one process, so from one resource."""
    first = spans[0]
    scope = first.instrumentation_scope
    inside = {"scope": {"name": scope.name if scope else ""}, "spans": [_span(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _fields(first.resource.attributes)}, "scopeSpans": [inside]}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None, "exported spans have ended and have a context"
    found: dict[str, Any] = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # on the wire 0 means unspecified
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _fields(span.attributes or {}),
        "status": {"code": span.status.status_code.value},
    }
    if span.status.description:
        found["status"]["message"] = span.status.description
    if span.parent is not None:
        found["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.links:
        found["links"] = [
            {"traceId": f"{link.context.trace_id:032x}", "spanId": f"{link.context.span_id:016x}"}
            for link in span.links
        ]
    return found


def _fields(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    # bool before int, since it is a subclass of int; 64-bit integers are strings in OTLP-JSON
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [_value(one) for one in value]}}
