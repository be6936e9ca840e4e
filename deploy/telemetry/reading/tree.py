"""One trace as a tree: from the order of a group to what became of it, and the steps that it went into. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deploy.telemetry.reading.recorded import Recorded

TRAJECTORY = "streamrl.trajectory_id"


@dataclass(frozen=True, slots=True)
class Branch:
    """A span, and how deep it lies."""

    depth: int
    span: Recorded


def branches(spans: Iterable[Recorded]) -> Iterator[Branch]:
    """Parents before their children, siblings by time; a span whose parent is not there is a root of its own."""
    unique = {span.span: span for span in spans}
    children: dict[str, list[Recorded]] = {}
    for span in sorted(unique.values(), key=lambda one: (one.start_ns, -one.end_ns)):
        children.setdefault(span.parent if span.parent in unique else "", []).append(span)
    pending = [Branch(0, root) for root in reversed(children.get("", []))]
    while pending:
        branch = pending.pop()
        yield branch
        pending += [Branch(branch.depth + 1, child) for child in reversed(children.get(branch.span.span, []))]


def of_trajectory(spans: Sequence[Recorded], name: str) -> list[Recorded]:
    """Without the other samples of the group; all of them if the name is not a trajectory's."""
    if not any(span.attributes.get(TRAJECTORY) == name for span in spans):
        return list(spans)
    return [span for span in spans if span.attributes.get(TRAJECTORY, name) == name]


def linked(spans: Iterable[Recorded]) -> list[str]:
    """The traces that these spans refer to, each once, in their order."""
    return list(dict.fromkeys(trace for span in spans for trace in span.links if trace != span.trace))
