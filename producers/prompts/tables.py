"""Stored data sets as numbered rows.

``data.path`` names a file, a directory, or else a data set of the Hugging Face hub. Text files are read in
``text_tables``, wherever they lie. All others are read by the `datasets` library. The columns, the order of passes and
the wording of prompts are up to others.

Invariant every_container_gives_the_same_rows: the same rows in any form of file or directory give the same values. The
forms differ only where a form cannot say something: csv has no numbers, and parquet has no missing keys.
"""

import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Protocol

from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.text_tables import TEXT_ENDINGS, Row, ending_of, open_text_table
from streamrl.schemas.errors import DataError, causes_of
from streamrl.schemas.extras import require_extra

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WHOLE = "train"
"""The only split of a single file: the name that the `datasets` library gives to a file without splits."""
BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
ENDINGS = (*TEXT_ENDINGS, *BUILDERS)
_SHARD = re.compile(r"(.*?)(\d{5})-of-(\d{5})\b")
SAVED = ("state.json", "dataset_dict.json")
"""Files by which one recognises a directory that `save_to_disk` wrote."""
SCAN_ROWS = 4096
"""Rows converted to Python at a time: enough to hide the cost of a call, and few enough to stay below about 10 MB."""
MAX_REASON = 300
"""Most characters of a library's message in an error: some messages contain whole schemas."""
_READ_OPTIONS = frozenset({"name", "version", "description", "data_dir", "data_files", "features", "sep", "delimiter"})
"""Options of a data set of text files that are understood, or have no effect on the values."""


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

    def scan(self) -> Iterator[Row]:
        """All rows in order.

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
        return open_file(place, settings.split, name)
    return open_hub(path, settings.subset, settings.split, name)


def check_path(path: str) -> None:
    """Check that a path exists or can be a name on the hub.

    Raises:
        DataError: there is no such file.
    """
    place = Path(path).expanduser()
    # data/train.jsonl could be a name on the hub, but its ending shows that it is a missing file.
    if not place.exists() and (ending_of(place) in ENDINGS or not HUB_ID.fullmatch(path)):
        raise DataError(f"expected a file, a directory or a data set of the hub at data.path, got {path}: no such file")


def plain_name(path: str) -> str:
    """The last part of a path without its endings, with other characters as dashes; prompts get their names from it."""
    last = Path(path).expanduser().absolute().name
    # Group ids and metrics contain the name, so it has only plain characters and is short.
    # It is cut only at a known ending: train.jsonl.gz becomes train, v1.2-train.csv becomes v1.2-train.
    stem = re.split(r"\.(?=jsonl?|ndjson|parquet|csv|tsv|arrow)", last)[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:64] or "prompts"


def _refuse_subset(subset: str | None, path: str) -> None:
    if subset is not None:
        raise DataError(f"expected no data.subset with the single file {path}, got {subset!r}; remove it")


def open_file(path: Path, split: str, name: str) -> Table:
    """The table in a file, plain or compressed.

    Raises:
        DataError: the file cannot be read in the format that its name shows.
    """
    ending = ending_of(path)
    if not re.match(rf"{WHOLE}\b", split):
        raise DataError(
            f'expected data.split = "{WHOLE}" or a part of it, such as "{WHOLE}[:90%]", for the single file {path}, '
            f"got {split!r}"
        )
    if ending in TEXT_ENDINGS:
        return _text_split({WHOLE: [_TextFile(path, str(path))]}, split, name)
    if ending not in BUILDERS:
        raise DataError(f"expected a file that ends in {', '.join(sorted(ENDINGS))} at data.path, got {path}")
    shown = str(path)
    return _opened(shown, lambda datasets: _loaded(datasets, (BUILDERS[ending],), shown, split, name, data_files=shown))


def open_directory(path: Path, subset: str | None, split: str, name: str) -> Table:
    """The table in a directory of data files, or in one that `save_to_disk` wrote.

    Raises:
        DataError: there is no such split or subset, or no readable data.
    """
    # save_to_disk has its own layout, which the library would otherwise read as separate data files.
    if any((path / file).exists() for file in SAVED):
        return _opened(str(path), lambda datasets: ArrowTable(_saved(datasets, path, split), str(path), name))
    return open_hub(str(path), subset, split, name)


def open_hub(repository: str, subset: str | None, split: str, name: str) -> Table:
    """A data set of the Hugging Face hub, or of a directory with the same layout.

    Raises:
        DataError: there is no such data set, subset or split, or the hub cannot be reached.
    """
    return _opened(repository, lambda datasets: _loaded(datasets, (repository, subset), repository, split, name))


class ArrowTable:
    """A `datasets.Dataset`; rows are numbered from 0 as in the library, and stay on disk as Arrow memory maps.

    Values are those of the library's own rows. Only images, audio and the like stay as they are stored.
    """

    def __init__(self, dataset: Any, path: str, name: str) -> None:
        self.name = name
        self._path = path
        # Stored values are not yet the row's: the library keeps columns of mixed types as JSON text, for example.
        self._features = type(dataset.features)(_without_media(dict(dataset.features)))
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Row:
        """The row at an index.

        Raises:
            DataError: the table's files cannot be read any more.
        """
        try:
            row: Row = self._features.decode_example(self._dataset[index : index + 1].to_pylist()[0])
        except Exception as error:
            raise DataError(f"expected to read {self.where(index)}, got: {_reason(error)}") from error
        return row

    def scan(self) -> Iterator[Row]:
        """All rows."""
        for batch in self._dataset.iter(SCAN_ROWS) if self._dataset.column_names else ():
            yield from map(self._features.decode_example, batch.to_pylist())

    def number(self, index: int) -> int:
        """The index itself."""
        return index

    def where(self, index: int) -> str:
        """Path and row."""
        return f"{self._path}, row {index}"


def _without_media(feature: Any) -> Any:
    """The library's type of a column, with images, audio and the like left as they are stored."""
    if isinstance(feature, Mapping):
        return {name: _without_media(inner) for name, inner in feature.items()}
    if hasattr(feature, "feature"):  # a list
        return replace(feature, feature=_without_media(feature.feature))
    # JSON is the one other type that is decoded: its text is only how the library stores the value.
    is_media = getattr(feature, "decode", False) and type(feature).__name__ != "Json"
    return replace(feature, decode=False) if is_media else feature


class JoinedTable:
    """Rows of several tables, one after the other, numbered from 0; of each only a slice, given by its two ends."""

    def __init__(self, parts: Sequence[tuple[Table, int, int]], name: str) -> None:
        self.name = name
        self._parts = parts
        self._ends = tuple(accumulate(end - start for _, start, end in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> Row:
        """One row.

        Raises:
            DataError: the row cannot be read, or has changed.
        """
        table, inner = self._find(index)
        return table.read(inner)

    def scan(self) -> Iterator[Row]:
        """All rows in order."""
        return chain.from_iterable(islice(table.scan(), start, end) for table, start, end in self._parts)

    def number(self, index: int) -> int:
        """The index itself."""
        return index

    def where(self, index: int) -> str:
        """The row's place in its own table."""
        table, inner = self._find(index)
        return table.where(inner)

    def _find(self, index: int) -> tuple[Table, int]:
        part = bisect(self._ends, index)
        table, _, end = self._parts[part]
        return table, end - (self._ends[part] - index)


@dataclass(frozen=True)
class _TextFile:
    """A text file: its path here, its name in messages, and what separates its cells, if its ending does not say it."""

    path: Path
    shown: str
    delimiter: str | None = None


def _text_split(files: Mapping[str, Sequence[_TextFile]], split: str, name: str) -> Table:
    """The rows of a split of text files; ``split`` may be a slice or a sum, as in the `datasets` library.

    Raises:
        DataError: a file cannot be read, or there is no such split.
    """

    def joined(part: str) -> Table:
        tables = [open_text_table(file.path, name, shown=file.shown, delimiter=file.delimiter) for file in files[part]]
        empty = [file.shown for file, table in zip(files[part], tables, strict=True) if not len(table)]
        if empty and len(tables) > 1:
            raise DataError(
                f"expected rows in every file of data.path, got none in {empty[0]}; fetch it again, or remove it"
            )
        return tables[0] if len(tables) == 1 else JoinedTable([(table, 0, len(table)) for table in tables], name)

    if split in files:
        return joined(split)
    opened = {part: joined(part) for part in files}

    def sliced(datasets: Any) -> Table:
        spans = datasets.ReadInstruction.from_spec(split).to_absolute({part: len(opened[part]) for part in opened})
        # a slice that ends before it starts has no rows
        return JoinedTable([(opened[span.splitname], span.from_, max(span.from_, span.to)) for span in spans], name)

    return _opened(", ".join(file.shown for part in files.values() for file in part), sliced)


def _opened(path: str, read: Callable[[Any], Table]) -> Table:
    """The table that ``read`` makes with the `datasets` library, which takes seconds to import."""
    require_extra("data", f"data.path {path!r}")
    import datasets

    # The library's own progress bars and log lines are switched off; the error raised below has what matters.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        return read(datasets)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"expected a data set at data.path {path!r}, got: {_reason(error)}{_advice(error)}") from error


def _loaded(datasets: Any, named: tuple[str | None, ...], path: str, split: str, name: str, **options: Any) -> Table:
    """The table that the library finds under these names; files of text are only found by it, and read here."""
    builder = datasets.load_dataset_builder(*named, **options)
    if Path(path).is_dir():
        _refuse_unread(datasets, Path(path), builder.config.data_files)
    if (files := _text_files(datasets, builder, path)) is not None:
        return _text_split(files, split, name)
    builder.download_and_prepare()
    dataset = builder.as_dataset(split=split)
    # Without a network the library has only its cache of a data set on the hub, not the files themselves.
    if dataset.info.builder_name in ("csv", "json"):
        raise DataError(
            f"expected the files of the data set at data.path {path!r}, got the library's cache of them, in which "
            "types are guessed; download the files, and set data.path to their directory"
        )
    return ArrowTable(dataset, path, name)


def _refuse_unread(datasets: Any, path: Path, read: Mapping[Any, Sequence[str]]) -> None:
    """Refuse a directory with data files that the library leaves out: of rarer endings, or without a split's name.

    A directory whose README lists its files has others on purpose.

    Raises:
        DataError: the directory has such files.
    """
    card = path / datasets.config.REPOCARD_FILENAME
    if card.exists() and re.search(r"^configs:", card.read_text(errors="replace"), re.MULTILINE):
        return
    known = {Path(file).resolve() for files in read.values() for file in files}
    _refuse_missing_shards(path, known)
    passed_over = datasets.data_files.FILES_TO_IGNORE
    unread = [
        file
        for file in sorted(path.rglob("*"))
        if ending_of(file) in ENDINGS and file.name not in passed_over and not file.is_dir()
        if not any(part.startswith((".", "__")) for part in file.relative_to(path).parts)
        if file.resolve() not in known
    ]
    if unread:
        raise DataError(
            f"expected every data file in {path} to be read, got {len(unread)} that would be left out, such as "
            f"{unread[0].relative_to(path)}: files of one ending are read, and if some have the name of a split, only "
            "those; move the others elsewhere, or set data.path to one file"
        )


def _refuse_missing_shards(path: Path, known: Collection[Path]) -> None:
    """Refuse a directory that lacks files of a set whose names count them, such as ``train-00000-of-00003.parquet``.

    Raises:
        DataError: a file is missing.
    """
    sets: dict[tuple[Path, str, int], set[int]] = {}
    for file in known:
        if numbered := _SHARD.match(file.name):
            before, number, count = numbered.groups()
            sets.setdefault((file.parent, before, int(count)), set()).add(int(number))
    for (folder, before, count), numbers in sorted(sets.items()):
        if len(numbers) < count:
            missing = next(number for number in range(count) if number not in numbers)
            raise DataError(
                f"expected {count} files {before}…-of-{count:05} in {folder}, as their names say, got {len(numbers)}: "
                f"number {missing} is missing; fetch the whole of {path}, or rename the files to train with these alone"
            )


def _text_files(datasets: Any, builder: Any, path: str) -> dict[str, list[_TextFile]] | None:
    """The text files of a data set by split, downloaded if they lie elsewhere; None if it has no text files.

    Raises:
        DataError: the data set asks for options, or has files, that cannot be read here.
    """
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    config = builder.config
    if not isinstance(config, CsvConfig | JsonConfig):
        return None
    usual = type(config)()
    asked = {field.name for field in fields(config) if getattr(config, field.name) != getattr(usual, field.name)}
    if strange := asked - _READ_OPTIONS:
        raise DataError(
            f"expected a data set at data.path {path!r} without options of its own for reading, got "
            f"{', '.join(sorted(strange))} in its README; download its files and convert them to jsonl"
        )
    download = datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    manager = datasets.DownloadManager(base_path=builder.base_path, download_config=download)
    delimiter = getattr(config, "sep", None)
    found = {}
    for split, names in config.data_files.items():
        if other := [each for each in names if ending_of(Path(each)) not in TEXT_ENDINGS]:
            raise DataError(
                f"expected files that end in {', '.join(TEXT_ENDINGS)} at data.path {path!r}, got {other[0]}"
            )
        places = manager.download(list(names))
        found[str(split)] = [
            _TextFile(Path(place), shown, delimiter) for shown, place in zip(names, places, strict=True)
        ]
    return found


def _saved(datasets: Any, path: Path, split: str) -> Any:
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
