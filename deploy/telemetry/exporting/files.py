"""Spans as OTLP-JSON, one batch a line, as OpenTelemetry's file exporters write them and its collector reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class FileExporter(SpanExporter):
    """Appends to a file that it makes; a process that was killed leaves at most half a line."""

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
    """All of one process, so of one resource."""
    first = spans[0]
    scope = first.instrumentation_scope
    inside = {"scope": {"name": scope.name if scope else ""}, "spans": [_span(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _fields(first.resource.attributes)}, "scopeSpans": [inside]}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None, "spans are exported when they are whole"
    found: dict[str, Any] = {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # on the wire 0 means that it is not known
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
