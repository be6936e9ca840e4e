"""`streamrl trace`: prints the trace of a trajectory, a group or a request, from the span files of its run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamrl.inspection.source import RUNS, open_run
from streamrl.observability.tracing.span_files import (
    TRAJECTORY,
    ExportedSpan,
    SpanNode,
    linked_traces,
    span_tree,
    spans_of_trajectory,
    spans_with,
)
from streamrl.schemas.errors import UserError
from streamrl.schemas.plain_text import plain_text

GROUP, CALL = "streamrl.group_id", "streamrl.call_id"
NAME_WIDTH, PROCESS_WIDTH = 28, 12
SHOWN = (
    "gen_ai.usage.output_tokens",
    "streamrl.predicted_length",
    "streamrl.policy.versions",
    "streamrl.policy.version",
    "streamrl.step",
    "streamrl.skip.reason",
    "streamrl.groups",
    "streamrl.turns",
    "messaging.destination.partition.id",
    "messaging.kafka.offset",
)
"""Attributes that a line shows, in addition to rewards. ``--json`` has all of them."""


def show_trace(name: str, where: Path | None, *, as_json: bool) -> None:
    """Print the trace of a trajectory, a group or a request, or the trace with this id.

    Raises:
        UserError: the run has no traces, or none with this name.
    """
    folder = _folder(where)
    spans, steps = find(folder, name)
    if as_json:
        print(json.dumps([asdict(span) for part in (spans, *steps) for span in part]))
        return
    print(plain_text(f"trace {spans[0].trace}"))
    for part in (spans, *steps):
        for node in span_tree(part):
            print(plain_text(_line(node, spans[0].start_ns)))


def find(folder: Path, name: str) -> tuple[list[ExportedSpan], list[list[ExportedSpan]]]:
    """The spans of the trace, oldest first, and the spans of each step that trained it.

    Raises:
        UserError: there is no such trace.
    """
    # The name as JSON: with its quotes, it does not match within longer names.
    quoted = json.dumps(name)
    named = [span for span in spans_with(folder, quoted) if name in map(span.attributes.get, (TRAJECTORY, GROUP, CALL))]
    trace = max(named, key=lambda span: span.start_ns).trace if named else name
    spans = spans_of_trajectory(_of(folder, trace), name)
    if not spans:
        raise UserError(
            f"expected a trajectory, a group, a request or a trace id in {folder}, got {name!r}; an example of a name "
            "is chain_sum/0/0/3; with OTEL_TRACES_SAMPLER_ARG below 1 not every group is traced"
        )
    return spans, [_of(folder, step) for step in linked_traces(spans)]


def _of(folder: Path, trace: str) -> list[ExportedSpan]:
    found = [span for span in spans_with(folder, f'"{trace}"') if span.trace == trace]
    return sorted(found, key=lambda span: span.start_ns)


def _folder(where: Path | None) -> Path:
    if where is not None:
        folder = open_run(where).directory.traces
    else:
        written = sorted(RUNS.glob("*/traces"), key=lambda path: path.stat().st_mtime)
        folder = written[-1] if written else RUNS / "<name>" / "traces"
    if not any(folder.glob("*.jsonl")):
        raise UserError(f'expected span files in {folder}, found none: set telemetry.traces = "file" before the run')
    return folder


def _line(node: SpanNode, origin_ns: int) -> str:
    span = node.span
    name = f"{'  ' * node.depth}{span.name}"
    start = f"{(span.start_ns - origin_ns) / 1e9:+.3f} s"
    duration = f"{span.duration_s * 1000:.1f} ms" if span.duration_s < 1 else f"{span.duration_s:.2f} s"
    details = "  ".join(_details(span))
    return f"{name:<{NAME_WIDTH}} {start:>12} {duration:>10}  {span.process:<{PROCESS_WIDTH}} {details}".rstrip()


def _details(span: ExportedSpan) -> Sequence[str]:
    shown = {key: span.attributes[key] for key in SHOWN if key in span.attributes}
    shown |= {key: value for key, value in span.attributes.items() if key.startswith("streamrl.reward.")}
    found = [f"{_short(key)}={_text(value)}" for key, value in shown.items()]
    if span.name == "sample":
        found.insert(0, str(span.attributes.get(TRAJECTORY, "")))
    if span.name == "dispatch":
        found.insert(0, f"{span.attributes.get(GROUP)} to {span.attributes.get('streamrl.worker_id')}")
    if span.name == "request":
        found.insert(0, str(span.attributes.get("streamrl.session") or span.attributes.get(CALL)))
    if attempt := span.attributes.get("streamrl.attempt"):
        found.append(f"attempt={attempt}")
    return [*found, f"failed: {span.problem}"] if span.problem else found


def _short(key: str) -> str:
    return key.removeprefix("streamrl.").removeprefix("messaging.").removesuffix(".id").rpartition(".")[2]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
