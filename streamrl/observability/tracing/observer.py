"""Tracing at a role's bus: writes contexts into the headers of what is sent, and tells the role's tracer what passed.

Knows no message and no exporter. A failing tracer ends tracing and nothing else: see ``observability.interceptor``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.interceptor import DeliveryReport
from streamrl.observability.tracing.context import SpanContext, context_of


class StoredRecord(NamedTuple):
    """The broker has a record; the offset is not known of records in transactions. Times: seconds since the epoch."""

    topic: str
    partition: int | None
    offset: int | None
    began_s: float
    ended_s: float


class OutgoingTrace(NamedTuple):
    """What a record shall carry, if anything, and who is told when the broker has it."""

    context: SpanContext | None
    on_stored: Callable[[StoredRecord], None]


class RoleTracer(Protocol):
    """Makes spans of what one role does. ``writes`` and ``reads``: full names of the topics it wants to see."""

    writes: frozenset[str]
    reads: frozenset[str]

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """A record is about to be sent, perhaps not for the first time; None if it belongs to no trace."""
        ...

    def received(self, record: Record, context: SpanContext) -> None:
        """A record that carries a context was read."""
        ...


@dataclass(frozen=True)
class TracingObserver:
    """``observability.interceptor.BusObserver`` for one tracer."""

    tracer: RoleTracer

    def sending(self, records: list[Outgoing]) -> "_TracedDelivery | None":
        """Give each record of a trace its header."""
        traced: list[tuple[Outgoing, OutgoingTrace]] = []
        for index, record in enumerate(records):
            if record.topic in self.tracer.writes and (trace := self.tracer.sending(record)) is not None:
                if trace.context is not None:
                    records[index] = record._replace(headers=(*record.headers, *trace.context.headers))
                traced.append((record, trace))
        return _TracedDelivery(traced) if traced else None

    def received(self, records: Sequence[Record]) -> None:
        """Show the tracer what carries a context."""
        for record in records:
            if record.topic in self.tracer.reads and (context := context_of(record.headers)) is not None:
                self.tracer.received(record, context)


@dataclass(frozen=True)
class _TracedDelivery:
    traced: Sequence[tuple[Outgoing, OutgoingTrace]]

    def accepted(self) -> None:
        """A span tells of what the broker has; until then it may still fail."""

    def settled(self, report: DeliveryReport) -> None:
        if report.error is not None:
            return
        for record, trace in self.traced:
            # the position of a single record; a transaction knows at most the partition that it asked for
            topic, partition, offset = report.position or (record.topic, record.partition, None)
            trace.on_stored(StoredRecord(topic, partition, offset, report.began_s, report.ended_s))
