import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamrl.cli.app import app
from streamrl.inspection.diagnostics.trace import find
from streamrl.observability.tracing.context import SpanContext, TraceSpan
from streamrl.observability.tracing.exporting import open_exporting
from streamrl.observability.tracing.settings import TelemetrySettings
from streamrl.schemas.errors import UserError

GROUP = {"streamrl.group_id": "a/0/0"}
STEP = SpanContext(0xE, 1)


def sample(index: int, start_s: float) -> list[TraceSpan]:
    name = {"streamrl.trajectory_id": f"a/0/0/{index}"}
    within, sent = SpanContext(0xA, 10 + index), SpanContext(0xA, 20 + index)
    return [
        TraceSpan("sample", within, SpanContext(0xA, 1), start_s, start_s + 1, attributes=GROUP | name),
        TraceSpan("send trajectories", sent, within, start_s + 0.9, start_s + 1, attributes=GROUP | name),
        TraceSpan("train", SpanContext(0xA, 30 + index), sent, start_s + 1, start_s + 2, attributes=name, links=[STEP]),
    ]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Of two processes, one of which was killed while it wrote."""
    exporting = open_exporting(TelemetrySettings(traces="file"), tmp_path / "r", "dispatcher", "dispatcher")
    exporting.record(TraceSpan("dispatch", SpanContext(0xA, 1), None, 100.0, 100.5, attributes=GROUP))
    exporting.record(
        TraceSpan("dispatch", SpanContext(0xB, 1), None, 101.0, 101.5, attributes={"streamrl.group_id": "a/1/0"})
    )
    exporting.close()
    exporting = open_exporting(TelemetrySettings(traces="file"), tmp_path / "r", "worker", "worker-1")
    for span in (*sample(1, 100.6), *sample(0, 100.5), TraceSpan("optimizer step", STEP, None, 100.0, 103.0)):
        exporting.record(span)
    exporting.record(TraceSpan("announce weights", SpanContext(0xE, 2), STEP, 103.0, 103.1))
    exporting.close()
    folder = tmp_path / "r" / "traces"
    with (folder / "worker-1.jsonl").open("a") as file:
        file.write('{"resourceSpans":[{"resource":{"attr a/0/0')
    return folder


def printed(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["trace", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output.splitlines()


def run_of(traces: Path) -> str:
    (traces.parent / "config.resolved.toml").write_text('[model]\npath = "m"\n[data]\npath = "p.jsonl"\n')
    return str(traces.parent)


def test_a_group_is_a_tree_with_the_steps_after_it(traces: Path) -> None:
    lines = printed("a/0/0", "--run", run_of(traces))
    assert lines[0] == f"trace {0xA:032x}"
    assert [line[:28].rstrip() for line in lines[1:]] == [
        "dispatch",
        "  sample",
        "    send trajectories",
        "      train",
        "  sample",
        "    send trajectories",
        "      train",
        "optimizer step",
        "  announce weights",
    ]
    assert "a/0/0/0" in lines[2]
    assert "+0.500 s" in lines[2]
    assert "1.00 s" in lines[2]


def test_a_trajectory_comes_without_its_siblings(traces: Path) -> None:
    lines = printed("a/0/0/1", "--run", run_of(traces))
    assert len(lines) == 1 + 4 + 2
    assert "a/0/0/1" in lines[2]


def test_a_trace_id_will_do_and_json_has_everything(traces: Path) -> None:
    spans = json.loads(printed(f"{0xA:032x}", "--run", run_of(traces), "--json")[0])
    assert len(spans) == 9
    assert {span["process"] for span in spans} == {"dispatcher", "worker-1"}


@pytest.mark.parametrize("name", ["a/0/9", "a", f"{0xC:032x}"])
def test_an_unknown_name_is_refused(traces: Path, name: str) -> None:
    with pytest.raises(UserError, match="expected a trajectory, a group, a request or a trace id"):
        find(traces, name)


def test_a_run_without_traces_says_which_setting_makes_them(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.toml").write_text('[model]\npath = "m"\n[data]\npath = "p.jsonl"\n')
    result = CliRunner().invoke(app, ["trace", "a/0/0", "--run", str(tmp_path)])
    assert isinstance(result.exception, UserError)
    assert "telemetry.traces" in str(result.exception)
