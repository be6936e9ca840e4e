from dataclasses import dataclass, field

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Outgoing, Record
from streamrl.observability.interceptor import observed
from streamrl.observability.tracing.context import SpanContext, context_of
from streamrl.observability.tracing.observer import OutgoingTrace, StoredRecord, TracingObserver
from streamrl.schemas.errors import Superseded

CONTEXT = SpanContext(7, 9)


@dataclass
class FakeTracer:
    """Writes down what it is shown, and fails where a test says so."""

    fails: str = ""
    stored: list[StoredRecord] = field(default_factory=list)
    seen: list[tuple[Record, SpanContext]] = field(default_factory=list)
    writes: frozenset[str] = frozenset({"t"})
    reads: frozenset[str] = frozenset({"t"})

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        if self.fails == "sending":
            raise ZeroDivisionError
        return OutgoingTrace(CONTEXT, self._store) if record.key == "traced" else None

    def _store(self, what: StoredRecord) -> None:
        if self.fails == "stored":
            raise ZeroDivisionError
        self.stored.append(what)

    def received(self, record: Record, context: SpanContext) -> None:
        if self.fails == "received":
            raise ZeroDivisionError
        self.seen.append((record, context))


def traced(tracer: FakeTracer) -> tuple[Bus, MemoryBus]:
    bus = MemoryBus()
    for topic in ("t", "other"):
        bus.create_topic(topic, 1)
    return observed(bus, TracingObserver(tracer)), bus


async def test_only_what_belongs_to_a_trace_carries_a_header() -> None:
    tracer = FakeTracer()
    bus, inner = traced(tracer)
    publisher = await bus.publisher("p")
    for topic, key in (("t", "traced"), ("t", "plain"), ("other", "traced")):
        await publisher.publish(Outgoing(topic, b"v", key, headers=(("schema", b"x"),)))
    first, second = inner.log("t").partitions[0]
    assert first.headers == (("schema", b"x"), *CONTEXT.headers)
    assert second.headers == inner.log("other").partitions[0][0].headers == (("schema", b"x"),)
    subscription = await bus.subscribe(["t"], client_id="c")
    assert await subscription.poll() == [first, second]
    assert tracer.seen == [(first, CONTEXT)]
    assert [(stored.partition, stored.offset) for stored in tracer.stored] == [(0, 0)]


async def test_the_records_of_a_transaction_have_spans_once_it_is_committed_and_none_if_it_is_not() -> None:
    tracer = FakeTracer()
    bus, _ = traced(tracer)
    old = await bus.transactional("id")
    await old.commit([Outgoing("t", b"v", "traced", 0), Outgoing("t", b"v", "plain", 0)])
    assert [(stored.partition, stored.offset) for stored in tracer.stored] == [(0, None)]
    await bus.transactional("id")
    with pytest.raises(Superseded):
        await old.commit([Outgoing("t", b"v", "traced", 0)])
    assert len(tracer.stored) == 1


@pytest.mark.parametrize("fails", ["sending", "stored", "received"])
async def test_tracing_never_fails(fails: str) -> None:
    tracer = FakeTracer(fails)
    bus, inner = traced(tracer)
    publisher, subscription = await bus.publisher("p"), await bus.subscribe(["t"], client_id="c")
    for _ in range(2):
        await publisher.publish(Outgoing("t", b"v", "traced"))
        assert [record.value for record in await subscription.poll()] == [b"v"]
    last = inner.log("t").partitions[0][1]
    assert context_of(last.headers) is None, "a tracer that failed is asked no more"
