from dataclasses import dataclass, field

import pytest

from bus.memory import MemoryBus
from bus.port import Outgoing, Record
from observability.tracing.context import Context, context_of
from observability.tracing.interceptor import Passage, Stored, Teller, TracedBus
from schemas.errors import Superseded

CONTEXT = Context(7, 9)


@dataclass
class Notebook:
    """A story that writes down what it is shown, and fails where a test says so."""

    fails: str = ""
    stored: list[Stored] = field(default_factory=list)
    seen: list[tuple[Record, Context]] = field(default_factory=list)
    writes: frozenset[str] = frozenset({"t"})
    reads: frozenset[str] = frozenset({"t"})

    def sending(self, record: Outgoing) -> Passage | None:
        if self.fails == "sending":
            raise ZeroDivisionError
        return Passage(CONTEXT, self._store) if record.key == "traced" else None

    def _store(self, what: Stored) -> None:
        if self.fails == "stored":
            raise ZeroDivisionError
        self.stored.append(what)

    def read(self, record: Record, context: Context) -> None:
        if self.fails == "read":
            raise ZeroDivisionError
        self.seen.append((record, context))


def traced(story: Notebook) -> tuple[TracedBus, MemoryBus]:
    bus = MemoryBus()
    for topic in ("t", "other"):
        bus.create_topic(topic, 1)
    return TracedBus(bus, Teller(story)), bus


async def test_only_what_belongs_to_a_trace_carries_a_header() -> None:
    story = Notebook()
    bus, inner = traced(story)
    publisher = await bus.publisher("p")
    for topic, key in (("t", "traced"), ("t", "plain"), ("other", "traced")):
        await publisher.publish(Outgoing(topic, b"v", key, headers=(("schema", b"x"),)))
    first, second = inner.log("t").partitions[0]
    assert first.headers == (("schema", b"x"), *CONTEXT.headers)
    assert second.headers == inner.log("other").partitions[0][0].headers == (("schema", b"x"),)
    subscription = await bus.subscribe(["t"], client_id="c")
    assert await subscription.poll() == [first, second]
    assert story.seen == [(first, CONTEXT)]
    assert [(stored.partition, stored.offset) for stored in story.stored] == [(0, 0)]


async def test_a_transaction_is_told_when_it_is_committed_and_not_when_it_is_not() -> None:
    story = Notebook()
    bus, _ = traced(story)
    old = await bus.transactional("id")
    await old.commit([Outgoing("t", b"v", "traced", 0)])
    assert [(stored.partition, stored.offset) for stored in story.stored] == [(0, None)]
    await bus.transactional("id")
    with pytest.raises(Superseded):
        await old.commit([Outgoing("t", b"v", "traced", 0)])
    assert len(story.stored) == 1


@pytest.mark.parametrize("fails", ["sending", "stored", "read"])
async def test_tracing_never_fails(fails: str) -> None:
    story = Notebook(fails)
    bus, inner = traced(story)
    publisher, subscription = await bus.publisher("p"), await bus.subscribe(["t"], client_id="c")
    for _ in range(2):
        await publisher.publish(Outgoing("t", b"v", "traced"))
        assert [record.value for record in await subscription.poll()] == [b"v"]
    last = inner.log("t").partitions[0][1]
    assert context_of(last.headers) is None, "a story that failed is asked no more"
