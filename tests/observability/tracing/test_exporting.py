import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from streamrl.bus.embedded.node import free_ports
from streamrl.observability.tracing import exporting as room
from streamrl.observability.tracing.context import SpanContext, TraceSpan
from streamrl.observability.tracing.exporting import Exporting, open_exporting
from streamrl.observability.tracing.settings import RATIO, TelemetrySettings, sampled_share
from streamrl.schemas.errors import SettingsError
from tests.progress import calm_s

ROOT, CHILD, OTHER = SpanContext(0xA, 0xB), SpanContext(0xA, 0xC), SpanContext(0xD, 0xE)
SPANS = [
    TraceSpan("dispatch", ROOT, None, 100.0, 100.5, "producer", {"text": "x", "count": 3, "share": 0.5, "is_it": True}),
    TraceSpan("train", CHILD, ROOT, 101.0, 102.25, "consumer", {"versions": ["1-1", "1-2"]}, [OTHER], "it failed"),
]


@dataclass
class Collector:
    """A real OTLP/HTTP receiver."""

    port: int
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            found.paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(server.server_port)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def opened(tmp_path: Path, port: int | None = None) -> Exporting:
    if port is None:
        return open_exporting(TelemetrySettings(traces="file"), tmp_path / "demo", "worker", "worker-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        return open_exporting(TelemetrySettings(traces="otlp"), tmp_path / "demo", "worker", "worker-1")


def test_a_share_of_the_traces_is_recorded_if_opentelemetrys_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RATIO, raising=False)
    assert sampled_share() == 1.0
    monkeypatch.setenv(RATIO, "0.25")
    assert sampled_share() == 0.25
    monkeypatch.setenv(RATIO, "many")
    with pytest.raises(SettingsError, match=f"from 0 to 1 in the environment variable {RATIO}, got 'many'"):
        sampled_share()


def test_a_collector_gets_the_spans_over_http(tmp_path: Path, collector: Collector) -> None:
    exporting = opened(tmp_path, collector.port)
    for span in SPANS:
        exporting.record(span)
    exporting.close()
    assert exporting.lost == 0
    assert set(collector.paths) == {"/v1/traces"}
    (resource,) = [part for request in collector.requests for part in request.resource_spans]
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (named["service.name"], named["service.instance.id"], named["streamrl.run"]) == (
        "streamrl-worker",
        "worker-1",
        "demo",
    )
    first, second = resource.scope_spans[0].spans
    assert first.trace_id == second.trace_id == ROOT.trace_id.to_bytes(16)
    assert (first.span_id, first.parent_span_id) == (ROOT.span_id.to_bytes(8), b"")
    assert (second.parent_span_id, second.links[0].trace_id) == (first.span_id, OTHER.trace_id.to_bytes(16))
    assert (second.end_time_unix_nano - second.start_time_unix_nano) / 1e9 == pytest.approx(1.25)
    assert (second.status.code, second.status.message) == (2, "it failed")


def test_a_file_has_otlp_json_that_says_the_same(tmp_path: Path) -> None:
    for _ in range(2):
        exporting = opened(tmp_path)
        for span in SPANS:
            exporting.record(span)
        exporting.close()
    lines = (tmp_path / "demo" / "traces" / "worker-1.jsonl").read_text().splitlines()
    assert len(lines) == 2, "a process that is started again goes on in its file"
    first, second = json.loads(lines[0])["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert first["traceId"] == f"{0xA:032x}"
    assert (first["kind"], second["kind"]) == (4, 5)
    assert "parentSpanId" not in first
    assert second["parentSpanId"] == first["spanId"] == f"{0xB:016x}"
    assert second["links"] == [{"traceId": f"{0xD:032x}", "spanId": f"{0xE:016x}"}]
    assert second["status"] == {"code": 2, "message": "it failed"}
    assert {one["key"]: one["value"] for one in first["attributes"]} == {
        "text": {"stringValue": "x"},
        "count": {"intValue": "3"},
        "share": {"doubleValue": 0.5},
        "is_it": {"boolValue": True},
    }


def test_an_unreachable_collector_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EVERY_MS", 20)
    monkeypatch.setattr(room, "TIMEOUT_S", 0.2)
    (port,) = free_ports(1)
    with structlog.testing.capture_logs() as logs:
        exporting = opened(tmp_path, port)
        for _ in range(3):
            exporting.record(SPANS[0])
            time.sleep(0.3)
        began = calm_s()
        exporting.close()
    assert calm_s() - began < 3
    assert [line["log_level"] for line in logs].count("warning") == 1
    assert exporting.lost == 3


def test_exporting_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that accepts and says nothing: the queue stays bounded, what is lost is counted, the end is near."""
    monkeypatch.setattr(room, "QUEUE", 64)
    monkeypatch.setattr(room, "BATCH", 16)
    monkeypatch.setattr(room, "END_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporting = opened(tmp_path, silent.getsockname()[1])
        began = calm_s()
        for _ in range(1000):
            exporting.record(SPANS[1])
        assert calm_s() - began < 1.0
        began = calm_s()
        exporting.close()
        assert calm_s() - began < 1.5
    assert exporting.lost == 1000
