"""The skip rows of one algorithm by lineage and number, in about 20 bytes a row.

The rows of a lineage are numbered from 1 without gaps, so a row's number is its place in plain columns. A row that is
added before its predecessors waits outside the columns (``ahead``).
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class RowContent(NamedTuple):
    """A row without the record's name: the reason's code, and the offsets ``offset`` to ``end`` - 1."""

    code: int
    partition: int
    offset: int
    end: int


class RowSum(NamedTuple):
    """The rolling hash, and the records by reason, of the ancestors' rows and a lineage's first ``rows`` rows."""

    rows: int
    hash: str
    reasons: Counter[str]


def _narrow() -> "array[int]":
    return array("B")


def _middle() -> "array[int]":
    return array("i")


def _wide() -> "array[int]":
    return array("q")


@dataclass
class _LineageRows:
    codes: "array[int]" = field(default_factory=_narrow)
    partitions: "array[int]" = field(default_factory=_middle)
    offsets: "array[int]" = field(default_factory=_wide)
    ends: "array[int]" = field(default_factory=_wide)
    ahead: dict[int, RowContent] = field(default_factory=dict)

    def get(self, sequence: int) -> RowContent | None:
        index = sequence - 1
        if not 0 <= index < len(self.codes):
            return self.ahead.get(sequence)
        return RowContent(self.codes[index], self.partitions[index], self.offsets[index], self.ends[index])

    def keep(self, sequence: int, content: RowContent) -> None:
        self.ahead[sequence] = content
        while (due := self.ahead.pop(len(self.codes) + 1, None)) is not None:
            columns = self.codes, self.partitions, self.offsets, self.ends
            for column, value in zip(columns, due, strict=True):
                column.append(value)

    def numbered(self) -> Iterator[tuple[int, RowContent]]:
        columns = zip(self.codes, self.partitions, self.offsets, self.ends, strict=True)
        for sequence, values in enumerate(columns, start=1):
            yield sequence, RowContent(*values)
        yield from sorted(self.ahead.items())


@dataclass
class SkipRows:
    """All rows, including those of undone lineages."""

    _lineages: dict[int, _LineageRows] = field(default_factory=dict)

    def keep(self, lineage: int, sequence: int, content: RowContent) -> RowContent | None:
        """Keep a row and return None. If one of this number is known already, keep that one and return it."""
        rows = self._lineages.setdefault(lineage, _LineageRows())
        if (known := rows.get(sequence)) is None:
            rows.keep(sequence, content)
        return known

    def get(self, lineage: int, sequence: int) -> RowContent | None:
        """A row by its number."""
        rows = self._lineages.get(lineage)
        return None if rows is None else rows.get(sequence)

    def first_of(self, lineage: int, last: int | None, codes: Collection[int]) -> tuple[int, RowContent] | None:
        """The first row of a lineage, up to number ``last``, that has one of these codes."""
        rows = self._lineages.get(lineage, _LineageRows())
        within = (each for each in rows.numbered() if last is None or each[0] <= last)
        return next((each for each in within if each[1].code in codes), None)

    def dumped(self) -> dict[int, Any]:
        """The rows as plain data and bytes."""
        return {
            lineage: [
                [column.tobytes() for column in (rows.codes, rows.partitions, rows.offsets, rows.ends)],
                {sequence: list(content) for sequence, content in rows.ahead.items()},
            ]
            for lineage, rows in self._lineages.items()
        }

    @classmethod
    def loaded(cls, dumped: dict[int, Any]) -> "SkipRows":
        """The rows that were dumped."""
        lineages: dict[int, _LineageRows] = {}
        for lineage, (columns, ahead) in dumped.items():
            rows = lineages[lineage] = _LineageRows()
            for column, content in zip((rows.codes, rows.partitions, rows.offsets, rows.ends), columns, strict=True):
                column.frombytes(content)
            rows.ahead = {sequence: RowContent(*content) for sequence, content in ahead.items()}
        return cls(lineages)
