"""Long append-only tables kept as plain numbers and one text buffer: about 100 bytes a row. Knows no meaning."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

PARTITION_SHIFT = 44
"""A place as one number: partition × 2⁴⁴ + offset."""


def keys_of(partitions: Ints, offsets: Ints) -> Ints:
    """Places as single numbers that sort by partition, then offset."""
    return (partitions << PARTITION_SHIFT) | offsets


def place_of(key: int) -> tuple[int, int]:
    """Partition and offset of such a number."""
    return int(key) >> PARTITION_SHIFT, int(key) & ((1 << PARTITION_SHIFT) - 1)


def as_ints(column: "array[int]") -> Ints:
    """A copy of a column as numpy array."""
    return np.array(column, dtype=np.int64)


class Names:
    """A list of texts, None among them; ``hashes`` tells them apart at the cost of 8 bytes each."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends: array[int] = array("Q")
        self._hashes: array[int] = array("Q")

    def append(self, name: str | None) -> None:
        """Add a text; an empty one counts as None."""
        content = (name or "").encode(errors="replace")
        self._text += content
        self._ends.append(len(self._text))
        self._hashes.append(xxhash.xxh3_64_intdigest(content) if content else 0)

    def __getitem__(self, index: int) -> str | None:
        begin = self._ends[index - 1] if index else 0
        return self._text[begin : self._ends[index]].decode() or None

    def hashes(self) -> NDArray[np.uint64]:
        """One number a text, 0 for None."""
        return np.array(self._hashes, dtype=np.uint64)


def _column() -> "array[int]":
    return array("q")


@dataclass
class Places:
    """Records of the trajectories topic, by where they stand and what they are called."""

    partitions: "array[int]" = field(default_factory=_column)
    offsets: "array[int]" = field(default_factory=_column)
    names: Names = field(default_factory=Names)

    def add_place(self, partition: int, offset: int, name: str | None) -> None:
        """Add a row."""
        self.partitions.append(partition)
        self.offsets.append(offset)
        self.names.append(name)

    def __len__(self) -> int:
        return len(self.offsets)

    def keys(self) -> Ints:
        """The places as single numbers, in the order of the rows."""
        return keys_of(as_ints(self.partitions), as_ints(self.offsets))


@dataclass
class Entries(Places):
    """What became of records: code 0 is trained, others name a skip reason.

    ``numbers``: the step of a trained record, the sequence of a skip row; ``ends``: the offset after the last record
    that a row stands for.
    """

    codes: "array[int]" = field(default_factory=_column)
    lineages: "array[int]" = field(default_factory=_column)
    numbers: "array[int]" = field(default_factory=_column)
    ends: "array[int]" = field(default_factory=_column)

    def add(self, code: int, lineage: int, number: int, place: Sequence[int], end: int, name: str | None) -> None:
        """Add a row; ``place`` is partition and offset."""
        self.add_place(place[0], place[1], name)
        self.codes.append(code)
        self.lineages.append(lineage)
        self.numbers.append(number)
        self.ends.append(end)
