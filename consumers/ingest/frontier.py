"""Which records are finished (trained in a completed step, or skipped), per partition. Pure.

A partition is a low-water mark, below which everything is finished, and the sparse finished offsets above it, because
groups span many offsets and end out of order. Invariants, each with a test of its name:
- nothing_finished_is_read_again: ``is_done`` stays true once it was, also through JSON;
- nothing_unfinished_is_passed: ``low`` is never above an offset that was read and is not finished;
- gaps_do_not_hold_the_low_mark: offsets that the log never delivers count as finished.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.schemas.reports import RecordRef


@dataclass
class PartitionFrontier:
    """Finished offsets of one partition. ``read``: offsets from ``low`` on, in the order in which they were read.

    ``passed``: finished stretches above ``low``, first offset and the one after the last, whose records are gone.
    """

    low: int = 0
    done: set[int] = field(default_factory=set)
    position: int = 0
    read: deque[int] = field(default_factory=deque)
    passed: list[tuple[int, int]] = field(default_factory=list)

    def mark_read(self, offset: int) -> None:
        """The next record read; whatever lies between it and the one before does not exist."""
        self.read.append(offset)
        self.position = offset + 1
        self._advance()

    def mark(self, offset: int) -> None:
        """Note one finished offset."""
        if offset >= self.low:
            self.done.add(offset)
            self._advance()

    def pass_over(self, first: int, end: int) -> None:
        """Finish a stretch that begins at ``position`` and can never be read."""
        self.passed.append((first, end))
        self.position = max(self.position, end)
        self._advance()
        # The stretch covers these offsets now; keeping them too would only make the checkpoint larger.
        self.done = {offset for offset in self.done if not first <= offset < end}

    def unfinished_stretches(self, first: int, end: int) -> list[tuple[int, int]]:
        """The stretches from ``first`` up to, not including, ``end`` that are not finished."""
        found: list[tuple[int, int]] = []
        start = max(first, self.low)
        # The finished stretches in order; what lies between the end of one and the beginning of the next is unfinished.
        for done_from, done_to in sorted([*((offset, offset + 1) for offset in self.done), *self.passed]):
            if start < min(done_from, end):
                found.append((start, min(done_from, end)))
            start = max(start, done_to)
        return [*found, (start, end)] if start < end else found

    def _advance(self) -> None:
        # ``read`` holds what was read and lies at or above ``low``, so its head is the lowest offset that can still
        # be unfinished. Without one, everything below ``position`` is finished: offsets between two records read do
        # not exist (compaction, transaction markers), and so they do not hold the low mark.
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
        """Records that were read and are not finished."""
        return sum(offset not in self.done for offset in self.read)

    def finished(self) -> int:
        """Offsets below the next one to be read that are finished; one that no record has counts as such."""
        return self.position - self.unfinished()

    def copy(self) -> "PartitionFrontier":
        """An independent copy."""
        return PartitionFrontier(self.low, set(self.done), self.position, deque(self.read), list(self.passed))

    def to_json(self) -> dict[str, Any]:
        """``{"low": 7, "done": [9]}``, and ``"passed": [[10, 90]]`` if there is such a stretch."""
        state: dict[str, Any] = {"low": self.low, "done": sorted(offset for offset in self.done if offset >= self.low)}
        return state | ({"passed": [list(stretch) for stretch in self.passed]} if self.passed else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PartitionFrontier":
        """Read what ``to_json`` wrote; reading is to start at the low mark."""
        low = int(data["low"])
        passed = [(int(first), int(end)) for first, end in data.get("passed", ())]
        # ``position`` falls back to ``low``: what was read above it and not finished is to be read again.
        return cls(low, {int(offset) for offset in data["done"]}, low, passed=passed)


@dataclass
class Frontier:
    """Finished offsets of all partitions of the trajectories topic."""

    partitions: dict[int, PartitionFrontier] = field(default_factory=dict)

    def mark_read(self, partition: int, offset: int) -> bool:
        """Note that a record was read; false if there is nothing to do for it: it is finished, or was read before."""
        found = self.partition(partition)
        if offset < found.position:
            return False
        finished = found.is_done(offset)
        found.mark_read(offset)
        return not finished

    def mark_done(self, refs: Iterable[RecordRef]) -> None:
        """Note finished records."""
        for ref in refs:
            self.partition(ref.partition).mark(ref.offset)

    def is_done(self, partition: int, offset: int) -> bool:
        """Whether a record is finished."""
        found = self.partitions.get(partition)
        return found is not None and found.is_done(offset)

    def partition(self, number: int) -> PartitionFrontier:
        """The frontier of one partition, at the beginning if nothing is known of it."""
        found = self.partitions.get(number)
        if found is None:
            found = self.partitions[number] = PartitionFrontier()
        return found

    def lows(self) -> dict[int, int]:
        """Where to read on after a restart, by partition."""
        return {number: found.low for number, found in sorted(self.partitions.items())}

    def positions(self) -> dict[int, int]:
        """Where reading goes on now, by partition."""
        return {number: found.position for number, found in sorted(self.partitions.items())}

    def begin_at(self, offsets: Mapping[int, int]) -> None:
        """Nothing below these offsets is of any concern; for a frontier of which nothing was read yet."""
        for number, first in offsets.items():
            self.partitions[number] = PartitionFrontier(low=first, position=first)

    def covering(self, partitions: int) -> "Frontier":
        """An independent copy in which partitions below this number that nothing is known of stand at offset 0.

        So what retention deletes before anything of a partition was read is missed too.
        """
        found = self.copy()
        for number in range(partitions):
            found.partition(number)
        return found

    def copy(self) -> "Frontier":
        """An independent copy: what a checkpoint keeps while this one goes on."""
        return Frontier({number: found.copy() for number, found in self.partitions.items()})

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe form for the checkpoint's manifest: ``{"0": {"low": 7, "done": [9]}}``."""
        return {str(number): found.to_json() for number, found in sorted(self.partitions.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Frontier":
        """Read what ``to_json`` wrote; reading is to start at the low marks."""
        return cls({int(number): PartitionFrontier.from_json(found) for number, found in data.items()})
