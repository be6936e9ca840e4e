"""Writes what was made up to a bus in memory, as if at its own time."""

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record
from streamrl.schemas.control import FlowControl, control_key
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, TRAJECTORIES
from tests.fakes.topics import create_topics
from tests.observability.run_state.made_up_run import PARTITIONS, Happening, MadeUpRun


def topics_of(run: str) -> MemoryBus:
    """A bus with the topics of a run."""
    return create_topics(MemoryBus(), run, PARTITIONS)


def append(bus: MemoryBus, run: str, happening: Happening) -> None:
    """Write it as if at its own time."""
    outgoing = Outgoing.of(happening.topic.full_name(run), happening.message, key=happening.key)
    append_raw(bus, outgoing, happening.partition, happening.at)


def append_raw(bus: MemoryBus, outgoing: Outgoing, partition: int, at: float) -> None:
    """Write bytes at a time."""
    log = bus.log(outgoing.topic).partitions[partition]
    log.append(
        Record(outgoing.topic, partition, len(log), outgoing.key, outgoing.value, outgoing.headers, timestamp=at)
    )


def append_letters(bus: MemoryBus, run: str, at: float) -> None:
    """Two dead letters: one that decodes today, and one that never will."""
    topic, source = DEAD_LETTERS.full_name(run), TRAJECTORIES.full_name(run)
    first = next(each for each in MadeUpRun(at).happenings() if each.topic is TRAJECTORIES)
    whole = Outgoing.of(source, first.message, key=first.key)
    kinds = [
        ("UnknownSchema", "expected one of our schemas, got 'trajectory' version 2", whole.value, whole.headers),
        ("MalformedFrame", "expected a msgpack map as trajectory header, got: b'\\x93'", b"\x93not a frame", ()),
    ]
    for offset, (error, reason, value, headers) in enumerate(kinds):
        told = {"error-class": error, "error": reason, "topic": source, "partition": "3", "offset": str(offset)}
        marks = tuple((f"dlq-{name}", content.encode()) for name, content in told.items())
        append_raw(bus, Outgoing(topic, value, "arithmetic/4/0", 0, (*headers, *marks)), 0, at)


def paused(at: float, mode: str) -> Happening:
    """An operator's pause, or the going on after it."""
    message = FlowControl(sequence=1, sent_at=at, mode=mode, reason="operator")
    return Happening(at, CONTROL, control_key(message), 0, message)
