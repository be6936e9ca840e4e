"""Tracing at a role's bus: writes contexts into the headers of sent records, and shows records to the role's tracer.

Knows no message and no exporter. A failing tracer ends only the tracing: see ``observability.interceptor``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.interceptor import DeliveryReport
from streamrl.observability.tracing.context import SpanContext, context_of


class StoredRecord(NamedTuple):
    """A record that the broker has. The offset of a record in a transaction is not known.

    Times are in seconds since the epoch: the start and the end of sending.
    """

    topic: str
    partition: int | None
    offset: int | None
    began_s: float
    ended_s: float


class OutgoingTrace(NamedTuple):
    """The context to write into a record, if any, and a callback for when the broker has the record."""

    context: SpanContext | None
    on_stored: Callable[[StoredRecord], None]


class RoleTracer(Protocol):
    """Makes the spans of one role. ``writes`` and ``reads``: full names of the topics that the tracer wants to see."""

    writes: frozenset[str]
    reads: frozenset[str]

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """Called before a record is sent, perhaps not for the first time. Returns None if it belongs to no trace."""
        ...

    def received(self, record: Record, context: SpanContext) -> None:
        """Called with each read record that carries a context."""
        ...


@dataclass(frozen=True)
class TracingObserver:
    """A ``BusObserver`` (``observability.interceptor``) for one tracer."""

    tracer: RoleTracer

    def sending(self, records: list[Outgoing]) -> "_TracedDelivery | None":
        """Add the header to each record that belongs to a trace."""
        traced: list[tuple[Outgoing, OutgoingTrace]] = []
        for index, record in enumerate(records):
            if record.topic in self.tracer.writes and (trace := self.tracer.sending(record)) is not None:
                if trace.context is not None:
                    records[index] = record._replace(headers=(*record.headers, *trace.context.headers))
                traced.append((record, trace))
        return _TracedDelivery(traced) if traced else None

    def received(self, records: Sequence[Record]) -> None:
        """Show the tracer the records that carry a context."""
        for record in records:
            if record.topic in self.tracer.reads and (context := context_of(record.headers)) is not None:
                self.tracer.received(record, context)


@dataclass(frozen=True)
class _TracedDelivery:
    traced: Sequence[tuple[Outgoing, OutgoingTrace]]

    def accepted(self) -> None:
        """Do nothing: a span is made once the broker has the record, and until then sending may fail."""

    def settled(self, report: DeliveryReport) -> None:
        if report.error is not None:
            return
        for record, trace in self.traced:
            # a single record has a position; a transaction knows at most the partition that it asked for
            topic, partition, offset = report.position or (record.topic, record.partition, None)
            trace.on_stored(StoredRecord(topic, partition, offset, report.began_s, report.ended_s))
