"""Columns of plain numbers and one text buffer: about 100 bytes a record, about 5 when dumped and compressed."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

PARTITION_SHIFT = 44
"""A position as one number: partition × 2⁴⁴ + offset. Leaves 19 bits for partitions; 2⁴⁴ offsets last for decades."""

Hashes = NDArray[np.uint64]


def hash_of(name: str) -> int:
    """A 64-bit hash of a name. Two given names have the same one with a probability of 2⁻⁶⁴."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="replace"))


def as_hashes(names: Collection[int]) -> Hashes:
    """Hashes of names as an array."""
    return np.fromiter(names, dtype=np.uint64, count=len(names))


def keys_of(partitions: Ints, offsets: Ints) -> Ints:
    """Positions as single numbers, which sort by partition, then offset."""
    return (partitions << PARTITION_SHIFT) | offsets


def position_of(key: int) -> tuple[int, int]:
    """The partition and offset of a key."""
    return int(key) >> PARTITION_SHIFT, int(key) & ((1 << PARTITION_SHIFT) - 1)


def as_ints(column: "array[int]") -> Ints:
    """A copy of a column as a numpy array."""
    return np.array(column, dtype=np.int64)


def as_column(values: NDArray[Any], kind: str = "q") -> "array[int]":
    """A numpy array as a column."""
    column = array(kind)
    column.frombytes(np.ascontiguousarray(values, dtype=np.dtype(kind)).tobytes())
    return column


def _packed(column: "array[int]") -> bytes:
    # Bytes of equal significance are stored next to each other. Most of them are equal, so they compress well.
    return np.frombuffer(column.tobytes(), dtype=np.uint8).reshape(-1, 8).T.tobytes()


def _unpacked(content: bytes, kind: str = "q") -> "array[int]":
    column = array(kind)
    column.frombytes(np.frombuffer(content, dtype=np.uint8).reshape(8, -1).T.tobytes())
    return column


class NameTable:
    """A list of texts or None. ``hashes`` (8 bytes each) compare them without decoding."""

    def __init__(self, text: bytes = b"", ends: "array[int] | None" = None, hashes: "array[int] | None" = None) -> None:
        # All texts in one buffer, text i at [ends[i - 1], ends[i]): a str each would cost tens of bytes more.
        self.text = bytearray(text)
        self._ends = array("Q") if ends is None else ends
        self._hashes = array("Q") if hashes is None else hashes

    def append(self, name: str | None) -> None:
        """Add a text; an empty one counts as None."""
        # A lone surrogate has no UTF-8 form: replaced, it still tells names apart well enough, and does not raise.
        content = (name or "").encode(errors="replace")
        self.text += content
        self._ends.append(len(self.text))
        # 0 marks None. A text hashes to 0 with a probability of 2⁻⁶⁴.
        self._hashes.append(xxhash.xxh3_64_intdigest(content) if content else 0)

    def __getitem__(self, index: int) -> str | None:
        begin = self._ends[index - 1] if index else 0
        return self.text[begin : self._ends[index]].decode() or None

    def hashes(self) -> Hashes:
        """One number a text, 0 for None."""
        return np.array(self._hashes, dtype=np.uint64)

    def sizes(self) -> Ints:
        """Bytes of each text."""
        ends = np.array(self._ends, dtype=np.int64)
        sizes: Ints = ends - np.concatenate((np.zeros(1, dtype=np.int64), ends))[: len(ends)]
        return sizes

    def chosen(self, which: Mask) -> "NameTable":
        """Only these texts."""
        sizes = self.sizes()
        text = np.frombuffer(bytes(self.text), dtype=np.uint8)[np.repeat(which, sizes)]
        return NameTable(text.tobytes(), as_column(np.cumsum(sizes[which]), "Q"), as_column(self.hashes()[which], "Q"))

    def extend(self, other: "NameTable") -> None:
        """Add all texts of another table."""
        self._ends += as_column(np.cumsum(other.sizes()) + len(self.text), "Q")
        self._hashes += as_column(other.hashes(), "Q")
        self.text += other.text

    def dumped(self) -> list[bytes]:
        """The table as bytes, without the hashes."""
        return [bytes(self.text), _packed(as_column(self.sizes()))]

    @classmethod
    def loaded(cls, dumped: Sequence[bytes]) -> "NameTable":
        """The table that was dumped."""
        text, sizes = dumped[0], as_ints(_unpacked(dumped[1]))
        ends = np.cumsum(sizes)
        names = (text[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True))
        hashes = array("Q", (xxhash.xxh3_64_intdigest(name) if name else 0 for name in names))
        return cls(text, as_column(ends, "Q"), hashes)


def _column() -> "array[int]":
    # 8 bytes a value in one block; a list would hold a pointer and an object of 28 bytes for each.
    return array("q")


@dataclass
class RecordPositions:
    """Records of the trajectories topic: partition, offset and trajectory id of each."""

    partitions: "array[int]" = field(default_factory=_column)
    offsets: "array[int]" = field(default_factory=_column)
    names: NameTable = field(default_factory=NameTable)

    def add_position(self, partition: int, offset: int, name: str | None) -> None:
        """Add a row."""
        self.partitions.append(partition)
        self.offsets.append(offset)
        self.names.append(name)

    def __len__(self) -> int:
        return len(self.offsets)

    def keys(self) -> Ints:
        """The positions as single numbers, in the order of the rows."""
        return keys_of(as_ints(self.partitions), as_ints(self.offsets))

    def columns(self) -> "tuple[array[int], ...]":
        """All columns but the names."""
        return self.partitions, self.offsets

    def chosen(self, which: Mask) -> Self:
        """Only these rows, in the same order."""
        return self._of([as_column(as_ints(column)[which]) for column in self.columns()], self.names.chosen(which))

    def extend(self, other: Self) -> None:
        """Add all rows of another table."""
        for column, more in zip(self.columns(), other.columns(), strict=True):
            column += more
        self.names.extend(other.names)

    def dumped(self) -> list[Any]:
        """The table as bytes that compress well."""
        return [[_packed(column) for column in self.columns()], self.names.dumped()]

    @classmethod
    def loaded(cls, dumped: Sequence[Any]) -> Self:
        """The table that was dumped."""
        return cls._of([_unpacked(content) for content in dumped[0]], NameTable.loaded(dumped[1]))

    @classmethod
    def _of(cls, columns: "Sequence[array[int]]", names: NameTable) -> Self:
        found = cls()
        for column, content in zip(found.columns(), columns, strict=True):
            column += content
        found.names = names
        return found


@dataclass
class RecordEntries(RecordPositions):
    """The fates of records. Code 0 is trained; the others are a skip reason, or ``CARRIED``: finished elsewhere.

    ``numbers``: the step of a trained record, or the sequence number of a skip row; ``ends``: the offset after the last
    record that a row covers.
    """

    codes: "array[int]" = field(default_factory=_column)
    lineages: "array[int]" = field(default_factory=_column)
    numbers: "array[int]" = field(default_factory=_column)
    ends: "array[int]" = field(default_factory=_column)

    def columns(self) -> "tuple[array[int], ...]":
        """See ``RecordPositions``."""
        return self.partitions, self.offsets, self.codes, self.lineages, self.numbers, self.ends

    def append(self, code: int, lineage: int, number: int, position: Sequence[int], end: int, name: str | None) -> None:
        """Add a row; ``position`` is partition and offset."""
        self.add_position(position[0], position[1], name)
        self.codes.append(code)
        self.lineages.append(lineage)
        self.numbers.append(number)
        self.ends.append(end)
