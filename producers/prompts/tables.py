"""Stored data sets as numbered rows, and the columns of prompt and answer.

``data.path`` names a file, a directory, or else a data set of the Hugging Face hub. The order of passes and the wording
of prompts are up to the prompt source.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.errors import DataError, causes_of
from streamrl.schemas.extras import require_extra

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WHOLE = "train"
"""The only split of a jsonl file: the name that the `datasets` library gives to a file without splits."""
ANSWER = "answer"
_MISSING = object()
BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
SAVED = ("state.json", "dataset_dict.json")
"""Files by which one recognises a directory that `save_to_disk` wrote."""
SCAN_ROWS = 4096
"""Rows converted to Python at a time: enough to hide the cost of a call, and few enough to stay below about 10 MB."""
MAX_REASON = 300
"""Most characters of a library's message in an error: some messages contain whole schemas."""
Row = dict[str, Any]


class Table(Protocol):
    """A stored data set: its rows are read in order, or by index from 0 to the length - 1."""

    @property
    def name(self) -> str:
        """A plain name, from which prompts get theirs."""

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, index: int) -> Row:
        """One row.

        Raises:
            DataError: the row cannot be read, or has changed.
        """

    def scan(self, columns: Collection[str] | None) -> Iterator[Row]:
        """All rows in order, with at least these columns if they exist; None: with all columns.

        Raises:
            DataError: a row cannot be read.
        """

    def number(self, index: int) -> int:
        """The row's number for people who look at the data: its line, or its index."""

    def where(self, index: int) -> str:
        """The row's place for messages, such as ``train.jsonl, line 5``."""


def open_table(settings: DataSettings, path: str) -> Table:
    """The table at a path.

    Raises:
        DataError: there is no table, or it cannot be read.
    """
    check_path(path)
    place = Path(path).expanduser()
    name = plain_name(path)
    if place.is_dir():
        return open_directory(place, settings.subset, settings.split, name)
    if place.exists():
        _refuse_subset(settings.subset, path)
        if place.suffix.lower() == ".jsonl":
            return _jsonl(place, settings.split, name)
        return open_file(place, settings.split, name)
    return open_hub(path, settings.subset, settings.split, name)


def check_path(path: str) -> None:
    """Check that a path exists or can be a name on the hub.

    Raises:
        DataError: there is no such file.
    """
    place = Path(path).expanduser()
    # data/train.jsonl could be a name on the hub, but its ending shows that it is a missing file.
    if not place.exists() and (builder_of(place) or not HUB_ID.fullmatch(path)):
        raise DataError(f"expected a file, a directory or a data set of the hub at data.path, got {path}: no such file")


def plain_name(path: str) -> str:
    """The last part of a path without its endings, with other characters as dashes; prompts get their names from it."""
    last = Path(path).expanduser().absolute().name
    # Group ids and metrics contain the name, so it has only plain characters and is short.
    # It is cut only at a known ending: train.jsonl.gz becomes train, v1.2-train.csv becomes v1.2-train.
    stem = re.split(r"\.(?=jsonl?|parquet|csv|arrow)", last)[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:64] or "prompts"


def _refuse_subset(subset: str | None, path: str) -> None:
    if subset is not None:
        raise DataError(f"expected no data.subset with the single file {path}, got {subset!r}; remove it")


class JsonlTable:
    """The non-blank lines of a file, one object each, numbered from 1 as in editors.

    Objects may have different columns. Memory: 16 bytes per line, for its offset and number; lines stay in the file.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Find the offsets of the lines.

        Raises:
            DataError: the file cannot be read.
        """
        self.name = name
        self._path = path
        # The file is read once here, and later line by line at these offsets.
        self._offsets = array("Q")
        self._lines = array("Q")
        try:
            # Binary, so that lengths of lines add up to offsets in bytes; text mode does not show these.
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
            DataError: the line is not an object, or the file changed since it was opened.
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
        """The line's number."""
        return self._lines[index]

    def where(self, index: int) -> str:
        """File and line."""
        return f"{self._path}, line {self._lines[index]}"

    def _parse(self, raw: bytes, index: int) -> Row:
        try:
            # Refuse NaN and Infinity here: Python reads them, and sending the prompt would fail later.
            row = json.loads(raw, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            # Without json's line number, which counts within this line and is always 1.
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(f"expected a JSON object in {self.where(index)}, got: {reason}") from error
        if not isinstance(row, dict):
            raise DataError(f"expected a JSON object in {self.where(index)}, got {type(row).__name__}")
        return row


def _jsonl(path: Path, split: str, name: str) -> JsonlTable:
    if split != WHOLE:
        raise DataError(f'expected data.split = "{WHOLE}", the only split of a jsonl file, got {split!r}')
    return JsonlTable(path, name)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


class ArrowTable:
    """A `datasets.Dataset`; rows are numbered from 0 as in the library, and stay on disk as Arrow memory maps."""

    def __init__(self, dataset: Any, path: str, name: str) -> None:
        self.name = name
        self._path = path
        # Arrow format, because in its own format the library would decode images and audio.
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Row:
        """The row at an index.

        Raises:
            DataError: the table's files cannot be read any more.
        """
        try:
            row: Row = self._dataset[index : index + 1].to_pylist()[0]
        except Exception as error:
            raise DataError(f"expected to read {self.where(index)}, got: {_reason(error)}") from error
        return row

    def scan(self, columns: Collection[str] | None) -> Iterator[Row]:
        """All rows; about half a million per second with the columns of a prompt."""
        # Only the needed columns are decoded: images and long texts stay on disk.
        wanted = self._dataset
        # If none of the columns exists, all are read: a table without columns would have no rows.
        if columns is not None and (names := [name for name in wanted.column_names if name in columns]):
            wanted = wanted.select_columns(names)
        for batch in wanted.iter(SCAN_ROWS) if wanted.column_names else ():
            yield from batch.to_pylist()

    def number(self, index: int) -> int:
        """The index itself."""
        return index

    def where(self, index: int) -> str:
        """Path and row."""
        return f"{self._path}, row {index}"


def builder_of(path: Path) -> str | None:
    """The reader for a file, by its name; compressed files end in ``.jsonl.gz`` and similar."""
    # For train.jsonl.gz the ending before that of the compression counts.
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def open_file(path: Path, split: str, name: str) -> ArrowTable:
    """The table in a parquet, csv, json or compressed jsonl file.

    Raises:
        DataError: the file cannot be read in the format that its name shows.
    """
    builder = builder_of(path)
    if builder is None:
        raise DataError(f"expected a file that ends in {', '.join(sorted(BUILDERS))} at data.path, got {path}")
    return _opened(str(path), name, lambda load: load(builder, data_files=str(path), split=split))


def open_directory(path: Path, subset: str | None, split: str, name: str) -> ArrowTable:
    """The table in a directory of data files, or in one that `save_to_disk` wrote.

    Raises:
        DataError: there is no such split or subset, or no readable data.
    """
    # save_to_disk has its own layout, which load_dataset would read as separate data files.
    if any((path / file).exists() for file in SAVED):
        return _opened(str(path), name, lambda _: _saved(path, split))
    return _opened(str(path), name, lambda load: load(str(path), subset, split=split))


def open_hub(repository: str, subset: str | None, split: str, name: str) -> ArrowTable:
    """A data set of the Hugging Face hub, from the library's cache if it is there.

    Raises:
        DataError: there is no such data set, subset or split, or the hub cannot be reached.
    """
    return _opened(repository, name, lambda load: load(repository, subset, split=split))


def _opened(path: str, name: str, read: Callable[[Callable[..., Any]], Any]) -> ArrowTable:
    """The table that ``read`` makes with the library's ``load_dataset``, which takes seconds to import."""
    require_extra("data", f"data.path {path!r}")
    import datasets

    # The library's own progress bars and log lines are switched off; the error raised below has what matters.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return ArrowTable(read(datasets.load_dataset), path, name)
    except Exception as error:
        raise DataError(f"expected a data set at data.path {path!r}, got: {_reason(error)}{_advice(error)}") from error


def _saved(path: Path, split: str) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    # A data set that was saved without splits has none to choose from.
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(f'Unknown split "{split}". Should be one of {sorted(loaded)}.')
    return loaded[split]


def _reason(error: BaseException) -> str:
    """A library's error message in one line: that of the first exception in a chain of causes."""
    # The library wraps its exceptions several times; the innermost one names the file or column.
    *_, first = causes_of(error)
    return " ".join(str(first).split())[:MAX_REASON] or type(first).__name__


def _advice(error: BaseException) -> str:
    # These are words of the library's messages. If they change, only the advice is lost.
    text = str(error)
    if "split" in text:
        return "; set data.split"
    if "onfig" in text and "available" in text:
        return "; set data.subset to one of them"
    if "the Hub" in text:
        return "; name a local file, or a data set that can be reached"
    return ""


@dataclass(frozen=True)
class ColumnMap:
    """Column paths of prompt and answer; the parts of a nested column are joined by dots.

    ``needs_answer``: whether a row without an answer is an error.
    """

    prompt: str
    answer: str
    needs_answer: bool = True

    @property
    def read(self) -> frozenset[str]:
        """Top-level columns that may contain prompt and answer."""
        # Either the whole path is a column's name, dots included, or its first part is: _at tries both.
        return frozenset(name for path in (self.prompt, self.answer) for name in (path, path.split(".")[0]))

    def split_row(self, row: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
        """The prompt (text, or a list of turns) and the columns for the rewards, the answer as ``answer``.

        Mapped columns are not among the columns for the rewards; the parent of a mapped nested value is.

        Raises:
            DataError: the prompt or answer is missing, or the prompt has another shape.
        """
        prompt = _checked_prompt(_at(row, self.prompt), self.prompt, row, where)
        answer = _at(row, self.answer)
        if answer is _MISSING and self.needs_answer:
            raise _missing(f"an answer in column {self.answer!r}", row, where, "data.answer_column")
        # The parent of a nested value stays, because rewards may need its other values.
        columns = {name: value for name, value in row.items() if name not in (self.prompt, self.answer)}
        return prompt, columns if answer is _MISSING else columns | {ANSWER: answer}


FORMATS = {
    "trl": ColumnMap("prompt", ANSWER, needs_answer=False),
    "verl": ColumnMap("prompt", "reward_model.ground_truth"),
    "openrlhf": ColumnMap("input", "label", needs_answer=False),
}


def column_map(settings: DataSettings) -> ColumnMap:
    """The format's columns, or those that the settings name."""
    # If the user names an answer column, rows without it are errors. The format's own column may be missing.
    preset = FORMATS[settings.format]
    return ColumnMap(
        settings.prompt_column or preset.prompt,
        settings.answer_column or preset.answer,
        preset.needs_answer or settings.answer_column is not None,
    )


def _at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path; a column whose name is the whole path takes precedence."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _checked_prompt(prompt: Any, path: str, row: Mapping[str, Any], where: str) -> Any:
    if prompt is _MISSING:
        raise _missing(f"a prompt in column {path!r}", row, where, "data.prompt_column")
    wrong = _fault_of(prompt)
    if wrong:
        raise DataError(f"expected text or a list of {{role, content}} in column {path!r} of {where}, got {wrong}")
    return prompt


def _fault_of(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "an empty text"
    if not isinstance(prompt, list):
        return "nothing" if prompt is None else type(prompt).__name__
    # Checked here, because a chat template would fail on an invalid turn only later, in a worker.
    for number, turn in enumerate(prompt, start=1):
        if not isinstance(turn, Mapping):
            return f"{type(turn).__name__} as turn {number}"
        if wrong := [key for key in ("role", "content") if not isinstance(turn.get(key), str)]:
            return f"turn {number} without text as {' and '.join(wrong)}"
    return None if prompt else "an empty list"


def _missing(what: str, row: Mapping[str, Any], where: str, setting: str) -> DataError:
    return DataError(f"expected {what} of {where}, got columns {sorted(map(str, row))}; set {setting} or data.format")
