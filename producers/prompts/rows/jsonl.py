"""A jsonl file as a table: one object a line, which may differ in their columns. Memory: 16 bytes a line."""

import json
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from producers.prompts.rows.table import Row
from schemas.errors import DataError


class JsonlTable:
    """The lines of a file that are not blank, numbered from 1 as editors do."""

    def __init__(self, path: Path, name: str) -> None:
        """Find the lines.

        Raises:
            DataError: the file cannot be read.
        """
        self.name = name
        self._path = path
        self._offsets = array("Q")
        self._lines = array("Q")
        try:
            with path.open("rb") as file:
                offset = 0
                for line, raw in enumerate(file, start=1):
                    if raw.strip():
                        self._offsets.append(offset)
                        self._lines.append(line)
                    offset += len(raw)
        except OSError as error:
            raise DataError(f"expected a readable file at data.path, got: {error}") from error

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Row:
        """The object in a line.

        Raises:
            DataError: it is none, or the file changed since it was opened.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[index])
                return self._parse(file.readline(), index)
        except OSError as error:
            raise DataError(f"expected to read {self._path}, got: {error}") from error

    def scan(self, columns: Collection[str] | None) -> Iterator[Row]:
        """Every object, in the order of the file."""
        with self._path.open("rb") as file:
            for index, raw in enumerate(raw for raw in file if raw.strip()):
                yield self._parse(raw, index)

    def number(self, index: int) -> int:
        """The line."""
        return self._lines[index]

    def where(self, index: int) -> str:
        """File and line."""
        return f"{self._path}, line {self._lines[index]}"

    def _parse(self, raw: bytes, index: int) -> Row:
        try:
            row = json.loads(raw, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected a JSON object in {self.where(index)}, got: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"expected a JSON object in {self.where(index)}, got {type(row).__name__}")
        return row


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
