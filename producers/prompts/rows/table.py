"""What a stored data set is to the prompt source: numbered rows. Knows no columns and no order of passes."""

from collections.abc import Collection, Iterator
from typing import Any, Protocol

Row = dict[str, Any]


class Table(Protocol):
    """Rows that can be read one after the other, and each by its index: 0 up to, not with, the length."""

    @property
    def name(self) -> str:
        """A plain name for prompts to be called after."""

    def __len__(self) -> int:
        """Rows in it."""

    def read(self, index: int) -> Row:
        """One row.

        Raises:
            DataError: it cannot be read, or is no longer what it was.
        """

    def scan(self, columns: Collection[str] | None) -> Iterator[Row]:
        """All rows in order, with at least these columns where they exist; None: with all.

        Raises:
            DataError: a row cannot be read.
        """

    def number(self, index: int) -> int:
        """What the row is known by to people who look at the data: its line, or its index."""

    def where(self, index: int) -> str:
        """The row in words, such as ``train.jsonl, line 5``."""
