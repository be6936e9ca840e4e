"""Prompts from a jsonl file, shuffled anew in every pass. Memory: about 24 bytes a line, whatever the lines hold."""

import json
import random
import re
from array import array
from pathlib import Path
from typing import Any

from producers.prompts.entries import make_prompt
from producers.prompts.filtering import load_filter
from producers.prompts.settings import DATASET_NAME, DataSettings
from schemas.errors import DataError
from schemas.messages.prompts import Prompt


class JsonlSource:
    """Every line is read once at the start, so that a malformed one ends the run before it begins.

    Prompts are named by their line, so a name stays the same whatever the seed and the filter are.
    """

    def __init__(self, settings: DataSettings, path: Path, seed: int) -> None:
        self._settings = settings
        self._path = path
        self._seed = seed
        self._dataset = _name_of(settings, path)
        self._accepts = load_filter(settings.filter)
        self._offsets = array("Q")
        self._lines = array("Q")
        self._index()
        self._shuffled: tuple[int, array[int]] = (-1, array("Q"))

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position, and the pass over the file it belongs to.

        Raises:
            DataError: the file changed since it was opened, or the prompt is too large.
        """
        data_pass, index = divmod(position, len(self._offsets))
        entry = self._order_of(data_pass)[index]
        line = self._lines[entry]
        try:
            with self._path.open("rb") as file:
                file.seek(self._offsets[entry])
                row = self._parse(file.readline(), line)
        except OSError as error:
            raise DataError(f"expected to read {self._path}, got: {error}") from error
        content = row.pop("prompt")
        prompt = make_prompt(self._settings, dataset=self._dataset, index=line, content=content, columns=row)
        return prompt, data_pass

    def _index(self) -> None:
        try:
            with self._path.open("rb") as file:
                offset = 0
                for line, raw in enumerate(file, start=1):
                    if raw.strip() and self._accepts(self._parse(raw, line)):
                        self._offsets.append(offset)
                        self._lines.append(line)
                    offset += len(raw)
        except OSError as error:
            raise DataError(f"expected a readable jsonl file at data.path, got: {error}") from error
        if not self._offsets:
            raise DataError(f"expected at least one prompt in {self._path} that the filter accepts, got none")

    def _parse(self, raw: bytes, line: int) -> dict[str, Any]:
        where = f"{self._path}, line {line}"
        try:
            row = json.loads(raw, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected a JSON object in {where}, got: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"expected a JSON object in {where}, got {type(row).__name__}")
        renamed: dict[str, Any] = {self._settings.columns.get(str(name), str(name)): row[name] for name in row}
        if not isinstance(renamed.get("prompt"), str | list):
            raise DataError(
                f"expected a column 'prompt' with text or chat turns in {where}, got columns {sorted(renamed)}; "
                "name the right one in data.columns"
            )
        return renamed

    def _order_of(self, data_pass: int) -> "array[int]":
        if self._shuffled[0] != data_pass:
            order = array("Q", range(len(self._offsets)))
            random.Random(f"{self._seed}/{data_pass}").shuffle(order)
            self._shuffled = (data_pass, order)
        return self._shuffled[1]


def _name_of(settings: DataSettings, path: Path) -> str:
    name = settings.dataset or path.stem
    if re.match(DATASET_NAME, name) is None:
        raise DataError(f"expected a plain file name such as 'train.jsonl', got {path.name!r}; set data.dataset")
    return name


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
