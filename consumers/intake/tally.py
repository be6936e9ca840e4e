"""Numbers the skip rows of a lineage, and sums them up for the checkpoint's manifest. Pure.

Invariant a_row_has_one_number: rows of a lineage are numbered from 1 without gaps, in the order of the books.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import xxhash

from schemas.messages.reports import SkipRecord


def chained(before: str, row: SkipRecord) -> str:
    """The next rolling hash: xxh3-128, in hex, over the one before and what the row is about, not how it is encoded."""
    identity = f"{row.lineage}/{row.sequence} {row.reason.value} {row.partition}@{row.offset}-{end_of(row)}"
    return xxhash.xxh3_128_hexdigest(f"{before}\n{identity}".encode())


def end_of(row: SkipRecord) -> int:
    """The offset after the last record that a row stands for."""
    return row.offset + 1 if row.end_offset is None else row.end_offset


@dataclass
class SkipTally:
    """``count`` rows of ``lineage``; ``hash`` and ``reasons`` (records by reason) go on from the parent's."""

    lineage: int
    count: int = 0
    hash: str = ""
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def next_sequence(self) -> int:
        """The number of the next row."""
        return self.count + 1

    def add(self, row: SkipRecord) -> None:
        """Note the next row."""
        assert (row.lineage, row.sequence) == (self.lineage, self.next_sequence), "rows are numbered without gaps"
        self.count += 1
        self.hash = chained(self.hash, row)
        self.reasons[row.reason.value] += end_of(row) - row.offset

    def copy(self) -> "SkipTally":
        """An independent copy."""
        return replace(self, reasons=Counter(self.reasons))

    def succeeded_by(self, lineage: int) -> "SkipTally":
        """Where the rows of the next lineage begin."""
        return SkipTally(lineage, 0, self.hash, Counter(self.reasons))
