"""Which table ``data.path`` means: a file by its name, a directory, else a data set of the hub."""

import re
from pathlib import Path

from producers.prompts.rows.jsonl import JsonlTable
from producers.prompts.rows.table import Table
from producers.prompts.settings import DataSettings
from schemas.errors import DataError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WHOLE = "train"


def open_table(settings: DataSettings, path: str) -> Table:
    """The table at a path.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from producers.prompts.rows import tables

    place = Path(path).expanduser()
    name = plain_name(path)
    if place.is_dir():
        return tables.open_directory(place, settings.subset, settings.split, name)
    if place.exists():
        _only_hub_sets_have(settings.subset, path)
        if place.suffix.lower() == ".jsonl":
            return _jsonl(place, settings.split, name)
        return tables.open_file(place, settings.split, name)
    if tables.builder_of(place) or not HUB_ID.fullmatch(path):
        raise DataError(f"expected a file, a directory or a data set of the hub at data.path, got {path}: no such file")
    return tables.open_hub(path, settings.subset, settings.split, name)


def plain_name(path: str) -> str:
    """What prompts are called after: the last part of a path without its endings, letters of other kinds as dashes."""
    last = Path(path).expanduser().absolute().name
    stem = re.split(r"\.(?=jsonl?|parquet|csv|arrow)", last)[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:64] or "prompts"


def _jsonl(path: Path, split: str, name: str) -> JsonlTable:
    if split != WHOLE:
        raise DataError(f'expected data.split = "{WHOLE}" with a jsonl file, which has no other, got {split!r}')
    return JsonlTable(path, name)


def _only_hub_sets_have(subset: str | None, path: str) -> None:
    if subset is not None:
        raise DataError(f"expected no data.subset with the single file {path}, got {subset!r}; remove it")
