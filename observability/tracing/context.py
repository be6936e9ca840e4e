"""Trace contexts: their W3C form in record headers, ids that follow from names, and who is sampled. Knows no library.

Invariants, each with a test of its name:
- the_same_work_has_the_same_ids: a record that is sent again carries the same header;
- everyone_agrees_on_what_is_sampled: the trace id alone decides, by OpenTelemetry's own rule; what is not sampled
  carries no header, so whoever reads a record needs no rule at all.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import structlog
import xxhash

from schemas.codec import Headers

# Remembers a bounded number of things; whoever is forgotten is only not told of.

K = TypeVar("K")
V = TypeVar("V")


class Memory(Generic[K, V]):
    """The newest ``limit`` entries, by when they were put."""

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._kept: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Remember; the oldest entry goes when there are too many."""
        self._kept.pop(key, None)
        self._kept[key] = value
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]

    def get(self, key: K) -> V | None:
        """What is remembered, or none."""
        return self._kept.get(key)

    def pop(self, key: K) -> V | None:
        """The same, and forget it."""
        return self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)


TRACEPARENT = "traceparent"
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?")
_LOW_64 = (1 << 64) - 1


class Context(NamedTuple):
    """A sampled span, as others refer to it."""

    trace_id: int
    span_id: int

    @property
    def trace(self) -> str:
        """The trace id as collectors show it: 32 hex digits."""
        return f"{self.trace_id:032x}"

    @property
    def headers(self) -> Headers:
        """The record header that carries it: W3C trace context, as readable text."""
        return ((TRACEPARENT, f"00-{self.trace_id:032x}-{self.span_id:016x}-01".encode()),)


def context_of(headers: Headers) -> Context | None:
    """The context that a record carries; none if there is none, it is not sampled, or it is not one."""
    for name, value in headers:
        if name == TRACEPARENT:
            return _parsed(value)
    return None


def _parsed(value: bytes | None) -> Context | None:
    found = _FORM.fullmatch(value or b"")
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
        return None
    context = Context(int(found[2], 16), int(found[3], 16))
    return context if all(context) and int(found[4], 16) & 1 else None


def trace_id_of(*names: object) -> int:
    """The trace of these names: 128 bits, never 0."""
    return xxhash.xxh3_128_intdigest(_joined(names)) or 1


def span_id_of(*names: object) -> int:
    """The span of these names: 64 bits, never 0."""
    return xxhash.xxh3_64_intdigest(_joined(names)) or 1


def is_sampled(trace_id: int, ratio: float) -> bool:
    """OpenTelemetry's rule for ratios: by the lower 64 bits of the trace id."""
    return (trace_id & _LOW_64) < round(ratio * (_LOW_64 + 1))


def _joined(names: tuple[object, ...]) -> bytes:
    return "\0".join(map(str, names)).encode()


# Puts the trace id into log lines that name a group or a trajectory of a sampled trace.


@dataclass
class LoggedTraces:
    """A structlog processor; without a noted group it changes nothing."""

    _by_group: Memory[str, str] = field(default_factory=Memory)

    def note(self, group_id: str, context: Context) -> None:
        """This group is traced."""
        self._by_group.put(group_id, context.trace)

    def __call__(self, _logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Add ``trace_id``."""
        if len(self._by_group) and (group := _group_of(event)) and (trace := self._by_group.get(group)):
            event.setdefault("trace_id", trace)
        return event


def _group_of(event: structlog.typing.EventDict) -> str:
    trajectory = event.get("trajectory")
    return str(trajectory).rpartition("/")[0] if trajectory else str(event.get("group", ""))
