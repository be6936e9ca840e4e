"""Trace contexts: their W3C form in record headers, ids that follow from names, and who is sampled. Knows no library.

Invariants, each with a test of its name:
- the_same_work_has_the_same_ids: a record that is sent again carries the same header;
- everyone_agrees_on_what_is_sampled: the trace id alone decides, by OpenTelemetry's own rule; what is not sampled
  carries no header, so whoever reads a record needs no rule at all.
"""

import re
from typing import NamedTuple

import xxhash

from schemas.wire.codec import Headers

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
