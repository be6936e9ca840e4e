"""Which records are finished (trained in a completed step, or skipped), per partition. Pure.

A partition is a low-water mark, below which everything is finished, and the sparse finished offsets above it: groups
span many offsets and complete out of order. Offsets that the log never delivers (transaction markers) are closed by
``skip_gap``. Invariant nothing_finished_is_read_again: ``is_done`` stays true once it was.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.messages.reports import RecordRef


@dataclass
class PartitionFrontier:
    """Finished offsets of one partition."""

    low: int = 0
    done: set[int] = field(default_factory=set)

    def mark(self, offset: int) -> None:
        """Note one finished offset."""
        if offset >= self.low:
            self.done.add(offset)
            while self.low in self.done:
                self.done.remove(self.low)
                self.low += 1

    def skip_gap(self, start: int, end: int) -> None:
        """Offsets from ``start`` to ``end`` (exclusive) hold no record."""
        for offset in range(max(start, self.low), end):
            self.mark(offset)


@dataclass
class Frontier:
    """Finished offsets of all partitions of the trajectories topic."""

    partitions: dict[int, PartitionFrontier] = field(default_factory=dict)

    def mark(self, partition: int, offset: int) -> None:
        """Note one finished record."""
        self.partition(partition).mark(offset)

    def mark_done(self, refs: Iterable[RecordRef]) -> None:
        """Note finished records."""
        for ref in refs:
            self.mark(ref.partition, ref.offset)

    def is_done(self, partition: int, offset: int) -> bool:
        """Whether a record is finished."""
        found = self.partitions.get(partition)
        return found is not None and (offset < found.low or offset in found.done)

    def partition(self, number: int) -> PartitionFrontier:
        """The frontier of one partition, at the beginning if nothing is known of it."""
        return self.partitions.setdefault(number, PartitionFrontier())

    def lows(self) -> dict[int, int]:
        """Where to read on, by partition."""
        return {number: found.low for number, found in sorted(self.partitions.items())}

    def copy(self) -> "Frontier":
        """An independent copy."""
        return Frontier({n: PartitionFrontier(p.low, set(p.done)) for n, p in self.partitions.items()})

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe form for the checkpoint's manifest."""
        return {
            str(number): {"low": found.low, "done": sorted(found.done)}
            for number, found in sorted(self.partitions.items())
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Frontier":
        """Read what ``to_json`` wrote."""
        return cls({int(n): PartitionFrontier(int(p["low"]), set(p["done"])) for n, p in data.items()})
