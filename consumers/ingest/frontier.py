"""Which records are finished (trained in a completed step, or skipped), for each partition. Pure.

A partition has a low-water mark, below which everything is finished, and a sparse set of finished offsets above it,
because groups span many offsets and end out of order. Invariants, each with a test of its name:
- finished_records_stay_finished: once ``is_done`` is true it stays true, also through JSON;
- the_low_mark_never_passes_an_unfinished_record: ``low`` is never above an offset that was read and is not finished;
- gaps_do_not_hold_the_low_mark: offsets that the log never delivers count as finished.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.schemas.reports import RecordRef


@dataclass
class PartitionFrontier:
    """Finished offsets of one partition.

    ``done``: finished offsets above ``low``. ``position``: the next offset to read. ``read``: offsets read, from
    ``low`` on, in order. ``passed``: finished ranges above ``low`` whose records are deleted, as (first offset, offset
    after the last).
    """

    low: int = 0
    done: set[int] = field(default_factory=set)
    position: int = 0
    read: deque[int] = field(default_factory=deque)
    passed: list[tuple[int, int]] = field(default_factory=list)

    def mark_read(self, offset: int) -> None:
        """Record the next offset read; offsets between it and the previous one do not exist."""
        self.read.append(offset)
        self.position = offset + 1
        self._advance()

    def mark(self, offset: int) -> None:
        """Record one finished offset."""
        if offset >= self.low:
            self.done.add(offset)
            self._advance()

    def pass_over(self, first: int, end: int) -> None:
        """Finish the range from ``first`` up to, not including, ``end``, which can never be read."""
        self.passed.append((first, end))
        self.position = max(self.position, end)
        self._advance()
        # The range now covers these offsets; keeping them too would only make the checkpoint larger.
        self.done = {offset for offset in self.done if not first <= offset < end}

    def unfinished_stretches(self, first: int, end: int) -> list[tuple[int, int]]:
        """The unfinished ranges from ``first`` up to, not including, ``end``."""
        found: list[tuple[int, int]] = []
        start = max(first, self.low)
        # Walks the finished ranges in order; the offsets between two of them are unfinished.
        for done_from, done_to in sorted([*((offset, offset + 1) for offset in self.done), *self.passed]):
            if start < min(done_from, end):
                found.append((start, min(done_from, end)))
            start = max(start, done_to)
        return [*found, (start, end)] if start < end else found

    def _advance(self) -> None:
        # ``read`` holds the offsets read at or above ``low``, so its head is the lowest one that may be unfinished. If
        # it is empty, everything below ``position`` is finished. Offsets between two records read do not exist
        # (compaction, transaction markers), and so they do not hold the low mark.
        while self.read and self.read[0] in self.done:
            self.done.remove(self.read.popleft())
        self.low = max(self.low, self.read[0] if self.read else self.position)
        if self.passed:
            self.passed = [(first, end) for first, end in self.passed if end > self.low]

    def is_done(self, offset: int) -> bool:
        """Whether this offset is finished."""
        if offset < self.low or offset in self.done:
            return True
        # ``passed`` is empty unless a loss was accepted, so the linear search costs nothing in the usual case.
        return bool(self.passed) and any(first <= offset < end for first, end in self.passed)

    def unfinished(self) -> int:
        """Number of records that were read and are not finished."""
        return sum(offset not in self.done for offset in self.read)

    def finished(self) -> int:
        """Number of finished offsets below ``position``; offsets without a record count as finished."""
        return self.position - self.unfinished()

    def copy(self) -> "PartitionFrontier":
        """An independent copy."""
        return PartitionFrontier(self.low, set(self.done), self.position, deque(self.read), list(self.passed))

    def to_json(self) -> dict[str, Any]:
        """``{"low": 7, "done": [9]}``, and ``"passed": [[10, 90]]`` if there are such ranges."""
        state: dict[str, Any] = {"low": self.low, "done": sorted(offset for offset in self.done if offset >= self.low)}
        return state | ({"passed": [list(stretch) for stretch in self.passed]} if self.passed else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PartitionFrontier":
        """The frontier that ``to_json`` wrote; reading must start at the low mark."""
        low = int(data["low"])
        passed = [(int(first), int(end)) for first, end in data.get("passed", ())]
        # ``position`` falls back to ``low``: records above it that were read but not finished must be read again.
        return cls(low, {int(offset) for offset in data["done"]}, low, passed=passed)


@dataclass
class Frontier:
    """Finished offsets of all partitions of the trajectories topic."""

    partitions: dict[int, PartitionFrontier] = field(default_factory=dict)

    def mark_read(self, partition: int, offset: int) -> bool:
        """Record that a record was read; false if it needs no work: it is finished, or was read before."""
        found = self.partition(partition)
        if offset < found.position:
            return False
        finished = found.is_done(offset)
        found.mark_read(offset)
        return not finished

    def mark_done(self, refs: Iterable[RecordRef]) -> None:
        """Record finished records."""
        for ref in refs:
            self.partition(ref.partition).mark(ref.offset)

    def is_done(self, partition: int, offset: int) -> bool:
        """Whether a record is finished."""
        found = self.partitions.get(partition)
        return found is not None and found.is_done(offset)

    def partition(self, number: int) -> PartitionFrontier:
        """The frontier of one partition; a new one at offset 0 if the partition is unknown."""
        found = self.partitions.get(number)
        if found is None:
            found = self.partitions[number] = PartitionFrontier()
        return found

    def lows(self) -> dict[int, int]:
        """By partition, the offset at which a restart continues reading."""
        return {number: found.low for number, found in sorted(self.partitions.items())}

    def positions(self) -> dict[int, int]:
        """By partition, the next offset to read now."""
        return {number: found.position for number, found in sorted(self.partitions.items())}

    def begin_at(self, offsets: Mapping[int, int]) -> None:
        """Start at these offsets and ignore everything below; nothing may have been read yet."""
        for number, first in offsets.items():
            self.partitions[number] = PartitionFrontier(low=first, position=first)

    def covering(self, partitions: int) -> "Frontier":
        """An independent copy that has all partitions below this number; unknown ones start at offset 0.

        So records that retention deletes before a partition was first read are noticed too.
        """
        found = self.copy()
        for number in range(partitions):
            found.partition(number)
        return found

    def copy(self) -> "Frontier":
        """An independent copy, for a checkpoint, while this one changes."""
        return Frontier({number: found.copy() for number, found in self.partitions.items()})

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe form for the checkpoint's manifest: ``{"0": {"low": 7, "done": [9]}}``."""
        return {str(number): found.to_json() for number, found in sorted(self.partitions.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Frontier":
        """The frontier that ``to_json`` wrote; reading must start at the low marks."""
        return cls({int(number): PartitionFrontier.from_json(found) for number, found in data.items()})
