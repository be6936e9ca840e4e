"""Reads the span files of a run (OTLP-JSON, one batch per line), and arranges the spans of a trace as a tree."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Attribute = str | bool | int | float | list[Any]
TRAJECTORY = "streamrl.trajectory_id"


@dataclass(frozen=True, slots=True)
class ExportedSpan:
    """A span as written to a file; ids in hex. ``links``: trace ids of the spans that it refers to."""

    trace: str
    span: str
    parent: str
    name: str
    process: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    links: tuple[str, ...]
    problem: str

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9


def spans_with(folder: Path, text: str) -> Iterator[ExportedSpan]:
    """All spans of the lines that contain a text, in no order. Half lines of killed processes are ignored.

    Each line is searched before it is parsed, so that most of a large file need not be parsed. A matching line may hold
    further spans.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open() as file:
            for line in file:
                if text in line:
                    yield from _spans(line)


def _spans(line: str) -> Iterator[ExportedSpan]:
    try:
        document = json.loads(line)
    except ValueError:
        return
    for part in document["resourceSpans"]:
        process = str(_attributes(part["resource"]).get("service.instance.id", "?"))
        for scope in part["scopeSpans"]:
            for span in scope["spans"]:
                yield _exported(span, process)


def _exported(span: dict[str, Any], process: str) -> ExportedSpan:
    return ExportedSpan(
        trace=span["traceId"],
        span=span["spanId"],
        parent=span.get("parentSpanId", ""),
        name=span["name"],
        process=process,
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span),
        links=tuple(link["traceId"] for link in span.get("links", ())),
        problem=span["status"].get("message", ""),
    )


def _attributes(owner: Mapping[str, Any]) -> dict[str, Attribute]:
    return {one["key"]: _value(one["value"]) for one in owner["attributes"]}


def _value(value: Mapping[str, Any]) -> Attribute:
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_value(one) for one in content["values"]]
    found: Attribute = content
    return found


@dataclass(frozen=True, slots=True)
class SpanNode:
    """A span, and its depth below the root of its tree."""

    depth: int
    span: ExportedSpan


def span_tree(spans: Iterable[ExportedSpan]) -> Iterator[SpanNode]:
    """The spans as a tree: parents before children, siblings by time. A span whose parent is missing is a root."""
    unique = {span.span: span for span in spans}
    children: dict[str, list[ExportedSpan]] = {}
    for span in sorted(unique.values(), key=lambda one: (one.start_ns, -one.end_ns)):
        children.setdefault(span.parent if span.parent in unique else "", []).append(span)
    # depth first, with a list instead of recursion; reversed, because the last element is taken next
    pending = [SpanNode(0, root) for root in reversed(children.get("", []))]
    while pending:
        node = pending.pop()
        yield node
        pending += [SpanNode(node.depth + 1, child) for child in reversed(children.get(node.span.span, []))]


def spans_of_trajectory(spans: Sequence[ExportedSpan], name: str) -> list[ExportedSpan]:
    """The spans without those of other samples of the group; all of them if the name is not a trajectory's."""
    if not any(span.attributes.get(TRAJECTORY) == name for span in spans):
        return list(spans)
    return [span for span in spans if span.attributes.get(TRAJECTORY, name) == name]


def linked_traces(spans: Iterable[ExportedSpan]) -> list[str]:
    """The ids of the traces that these spans link to, each once, in order."""
    return list(dict.fromkeys(trace for span in spans for trace in span.links if trace != span.trace))
