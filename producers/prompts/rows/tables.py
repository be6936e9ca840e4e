"""Tables that the `datasets` library reads: parquet, csv and json files, directories, and the Hugging Face hub.

Rows stay on disk as Arrow memory maps. Importing the library takes seconds, so it happens when a table is opened.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from producers.prompts.rows.table import Row
from schemas.errors import DataError

BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` leaves in a directory."""
SCAN_ROWS = 4096
MAX_REASON = 300


class ArrowTable:
    """A `datasets.Dataset`; rows are numbered from 0 as the library does."""

    def __init__(self, dataset: Any, path: str, name: str) -> None:
        self.name = name
        self._path = path
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Row:
        """The row at an index.

        Raises:
            DataError: the files behind the table cannot be read any more.
        """
        try:
            row: Row = self._dataset[index : index + 1].to_pylist()[0]
        except Exception as error:
            raise DataError(f"expected to read {self.where(index)}, got: {_reason(error)}") from error
        return row

    def scan(self, columns: Collection[str] | None) -> Iterator[Row]:
        """All rows; about half a million a second with the columns of a prompt."""
        wanted = self._dataset
        if columns is not None:
            wanted = wanted.select_columns([name for name in wanted.column_names if name in columns])
        for batch in wanted.iter(SCAN_ROWS) if wanted.column_names else ():
            yield from batch.to_pylist()

    def number(self, index: int) -> int:
        """The index itself."""
        return index

    def where(self, index: int) -> str:
        """Table and row."""
        return f"{self._path}, row {index}"


def builder_of(path: Path) -> str | None:
    """Which reader a file's name asks for; compressed ones end in ``.jsonl.gz`` and the like."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def open_file(path: Path, split: str, name: str) -> ArrowTable:
    """A parquet, csv, json or compressed jsonl file.

    Raises:
        DataError: it cannot be read as what its name says it is.
    """
    builder = builder_of(path)
    if builder is None:
        raise DataError(f"expected a file that ends in {', '.join(sorted(BUILDERS))} at data.path, got {path}")
    return _opened(str(path), name, lambda load: load(builder, data_files=str(path), split=split))


def open_directory(path: Path, subset: str | None, split: str, name: str) -> ArrowTable:
    """A directory of data files, or one that `save_to_disk` made.

    Raises:
        DataError: there is no such split or subset, or nothing that can be read.
    """
    if any((path / file).exists() for file in SAVED):
        return _opened(str(path), name, lambda _: _saved(path, split))
    return _opened(str(path), name, lambda load: load(str(path), subset, split=split))


def open_hub(repository: str, subset: str | None, split: str, name: str) -> ArrowTable:
    """A data set of the Hugging Face hub, from the library's cache where it has it.

    Raises:
        DataError: there is no such data set, subset or split, or the hub cannot be reached.
    """
    return _opened(repository, name, lambda load: load(repository, subset, split=split))


def _opened(path: str, name: str, read: Callable[[Callable[..., Any]], Any]) -> ArrowTable:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return ArrowTable(read(datasets.load_dataset), path, name)
    except Exception as error:
        raise DataError(f"expected a data set at data.path {path!r}, got: {_reason(error)}{_advice(error)}") from error


def _saved(path: Path, split: str) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(f'Unknown split "{split}". Should be one of {sorted(loaded)}.')
    return loaded[split]


def _reason(error: BaseException) -> str:
    """What a library has to say, in one line; of a chain of causes the first, which knows what was wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__


def _advice(error: BaseException) -> str:
    text = str(error)
    if "split" in text:
        return "; set data.split"
    if "onfig" in text and "available" in text:
        return "; set data.subset to one of them"
    if "the Hub" in text:
        return "; name a local file, or a data set that can be reached"
    return ""
