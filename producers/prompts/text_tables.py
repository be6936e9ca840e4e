"""Tables in text files: JSON lines, JSON documents, csv and tsv, plain or compressed.

All of them are read as JSON lines. A file of another form is rewritten as JSON lines into a temporary file first, which
the system deletes with the process. So every form gives the same values.

Invariants:
- text_stays_text: what a file has in quotes, or in the cell of a csv file, is read as that text. A number, a date or a
  word such as NA is not looked for in it;
- only_an_unquoted_blank_is_nothing: an empty cell of a csv file is None, and "" is an empty text.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import os
import shutil
import tempfile
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any, Literal

from streamrl.schemas.errors import DataError
from streamrl.schemas.extras import require_extra

Row = dict[str, Any]
LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TEXT_ENDINGS = (*LINES, ".json", *DELIMITERS)
BLOCK_BYTES = 32 << 20
"""Bytes of a csv file that are parsed at a time. No row may be longer; the largest prompt has 2 MiB."""


def _open_zstandard(path: Path) -> IO[bytes]:
    require_extra("data", f"data.path {str(path)!r}")
    import pyarrow

    stream: IO[bytes] = pyarrow.input_stream(str(path), compression="zstd")
    return stream


_DECOMPRESSORS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
COMPRESSED = frozenset(_DECOMPRESSORS)


def ending_of(path: Path) -> str:
    """The ending that names a file's format: for ``train.jsonl.gz`` that is ``.jsonl``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class LinesTable:
    """The non-blank lines of a file of JSON lines. Memory: 16 bytes per line, for its offset and number.

    Objects may have different columns. A row is numbered by its line, from 1 as in editors, or from 0 if it is not a
    line of the file that the user knows.
    """

    def __init__(self, file: Path | IO[bytes], shown: str, name: str, unit: Literal["line", "row"] = "line") -> None:
        """Find the offsets of the lines.

        ``file``: its path, or a temporary file. A path is opened for each row, because a data set may have more files
        than a process may have open. ``shown``: the file's name in messages.

        Raises:
            OSError: the file cannot be read.
        """
        self.name = name
        self._file = file
        if not isinstance(file, Path):
            weakref.finalize(self, file.close)
        self._place = f"{shown}, {unit}"
        self._offsets = array("Q")
        self._numbers = array("Q")
        self._size = 0
        with _opened(file) as lines:
            # Binary, so that lengths of lines add up to offsets in bytes; text mode does not show these.
            for number, raw in enumerate(lines, start=int(unit == "line")):
                if raw.strip():
                    self._offsets.append(self._size)
                    self._numbers.append(number)
                self._size += len(raw)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> Row:
        """The object in a line.

        Raises:
            DataError: the line is not an object, or the file changed since it was opened.
        """
        start = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self) else self._size
        try:
            with _opened(self._file) as lines:
                # At a place and not from the file's own position, which all readers of a temporary file share.
                return self._row(os.pread(lines.fileno(), end - start, start), index)
        except OSError as error:
            raise DataError(f"expected to read {self.where(index)}, got: {error}") from error

    def scan(self) -> Iterator[Row]:
        """Every object, in the order of the file."""
        with _opened(self._file) as lines:
            for index, raw in enumerate(raw for raw in lines if raw.strip()):
                yield self._row(raw, index)

    def _row(self, raw: bytes, index: int) -> Row:
        try:
            row = _parsed(raw)
        except (ValueError, RecursionError) as error:
            # Without json's line number, which counts within this line and is always 1.
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(f"expected a JSON object in {self.where(index)}, got: {reason}") from error
        if not isinstance(row, dict):
            raise DataError(f"expected a JSON object in {self.where(index)}, got {type(row).__name__}")
        return row

    def number(self, index: int) -> int:
        """The line's number."""
        return self._numbers[index]

    def where(self, index: int) -> str:
        """File and line."""
        return f"{self._place} {self._numbers[index]}"


def open_text_table(path: Path, name: str, *, shown: str = "", delimiter: str | None = None) -> LinesTable:
    """The table in a text file, in the form that its ending names.

    ``shown``: the file's name in messages, if it is not the path; it then also has the ending. ``delimiter``: of the
    cells, if the ending does not say it.

    Raises:
        DataError: the file cannot be read in this form.
    """
    shown = shown or str(path)
    ending, suffix = ending_of(Path(shown)), Path(shown).suffix.lower()
    try:
        file = _decompressed(path, suffix) if suffix in COMPRESSED else path
        if ending in LINES or (ending == ".json" and _starts_with_a_row(file)):
            return LinesTable(file, shown, name)
        # When the rows are in another file, the temporary one is closed, which deletes it.
        with file.open("rb") if isinstance(file, Path) else file as source:
            source.seek(0)
            is_table = ending in DELIMITERS
            rows = _cells(source, shown, delimiter or DELIMITERS[ending]) if is_table else _document(source, shown)
            return LinesTable(_rewritten(rows), shown, name, "row")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"expected a readable file at data.path, got {shown}: {error}") from error


def _opened(file: Path | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """The file, to be read from its start; a temporary file stays open."""
    if isinstance(file, Path):
        return file.open("rb")
    file.seek(0)
    return nullcontext(file)


def _parsed(raw: bytes) -> Any:
    return _DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass"))  # as json.loads reads bytes


def _object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):  # Python keeps the last of them
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in found if names.count(name) > 1)!r} more than once")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(written: str) -> float:
    if math.isinf(number := float(written)):
        raise ValueError(f"the number {written:.40} is too large; give it as text")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
"""Made once: ``json.loads`` makes one for each text. It refuses NaN and numbers without an end, which Python reads from
Infinity and from 1e400: another value than the data has."""


def _decompressed(path: Path, suffix: str) -> IO[bytes]:
    with _DECOMPRESSORS[suffix](path) as source:
        return _written(lambda file: shutil.copyfileobj(source, file))


def _rewritten(rows: Iterable[Any]) -> IO[bytes]:
    return _written(lambda file: file.writelines(json.dumps(row).encode() + b"\n" for row in rows))


def _written(write: Callable[[IO[bytes]], object]) -> IO[bytes]:
    """A temporary file with what ``write`` writes, which stays open for its table."""
    with ExitStack() as on_failure:
        file: IO[bytes] = on_failure.enter_context(tempfile.TemporaryFile())
        write(file)
        file.flush()
        on_failure.pop_all()
        return file


def _starts_with_a_row(file: Path | IO[bytes]) -> bool:
    """Whether a .json file has one object per line: its first line with text is a whole object."""
    with _opened(file) as lines:
        first = next((raw for raw in lines if raw.strip()), b"")
    try:
        return isinstance(_parsed(first), dict)
    except (ValueError, RecursionError):
        return False


def _document(file: IO[bytes], shown: str) -> list[Any]:
    try:
        found = _parsed(file.read())
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected a list of JSON objects, or one per line, in {shown}, got: {error}") from error
    return found if isinstance(found, list) else [found]


def _cells(file: IO[bytes], shown: str, delimiter: str) -> Iterator[Row]:
    """The rows of a csv file, each cell as the text that is written there."""
    require_extra("data", f"data.path {shown!r}")
    import pyarrow
    from pyarrow import csv as arrow_csv

    names = _names_in(file, shown, delimiter)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"expected columns of different names in {shown}, got {', '.join(repeated)} more than once")
    if padded := [name for name in names if name != name.strip()]:
        raise DataError(
            f"expected names of columns without spaces around them in {shown}, got {padded[0]!r}; leave out the spaces "
            f"after {delimiter!r}, also those in the rows"
        )
    # All columns are declared as text, so that none is guessed to be numbers, dates or truth values.
    converting = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pyarrow.string()),
        include_columns=names,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    reading = arrow_csv.ReadOptions(block_size=BLOCK_BYTES)
    parsing = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        for batch in arrow_csv.open_csv(file, reading, parsing, converting):
            yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, pyarrow.ArrowKeyError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"expected a csv file in UTF-8 at data.path, with as many cells in each row as in the first, "
            f"got {shown}: {reason}; a text with {delimiter!r} or a line break needs quotes"
        ) from error


def _names_in(file: IO[bytes], shown: str, delimiter: str) -> list[str]:
    """The names in the first row, after a look at the quotes of all rows. The file is at its start afterwards.

    Raises:
        DataError: a cell has more text after its closing quote. Arrow would read other text, or join rows.
    """
    # Not by Arrow, which reads ahead in threads that another reader of the file would disturb.
    lines = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
    csv.field_size_limit(BLOCK_BYTES)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next((row for row in rows if row), [])
        deque(rows, maxlen=0)
    except csv.Error as error:
        raise DataError(
            f"expected quotes around whole cells in {shown}, got at line {rows.line_num}: {error}; write a quote "
            'within a quoted cell twice: ""'
        ) from error
    finally:
        lines.detach()
        file.seek(0)
    return names
