"""What happens on the simulated bus, in order: for the trace of a seed, and for the history checker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from streamrl.bus.port import Record

Event = tuple[float, str, str, tuple[Any, ...]]


@dataclass
class Events:
    """Time, kind, who, and details, of everything. Details hold nothing that differs from run to run."""

    clock: Callable[[], float]
    seen: list[Event] = field(default_factory=list)
    acknowledged: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    delivered: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)

    def add(self, kind: str, who: str, *details: Any) -> None:
        """Note an event."""
        self.seen.append((self.clock(), kind, who, details))

    def acked(self, who: str, topic: str, partition: int, offset: int, value: bytes | None) -> None:
        """The writer was told that its record stands there."""
        self.seen.append((self.clock(), "ack", who, (topic, partition, offset)))
        self.acknowledged.append((who, topic, partition, offset, digest_of(value)))

    def polled(self, who: str, records: list[Record]) -> None:
        """A reader was given records."""
        self.seen.append((self.clock(), "poll", who, tuple((r.topic, r.partition, r.offset) for r in records)))
        for record in records:
            self.delivered.setdefault((who, record.topic, record.partition), []).append(record.offset)

    def hash(self) -> str:
        """One value for the whole run: two runs with the same one went the same way."""
        return xxhash.xxh3_128_hexdigest(repr(self.seen).encode())


def digest_of(value: bytes | None) -> int:
    """Identity of a record's content."""
    return -1 if value is None else xxhash.xxh3_64_intdigest(value)
