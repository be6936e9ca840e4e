"""Sources of the dispatcher's prompts: reasoning-gym data sets, or tables of stored rows, read by position.

Invariants:
- a_position_names_one_prompt: the same settings, seed and position give the same prompt, in every process and at any
  time. So the cursor of a run is one integer, and a restart needs no copy of the prompts that were read;
- positions_never_end: each pass over the data is followed by another, in a new order or with a new seed.
"""

import random
from array import array
from bisect import bisect
from collections.abc import Callable, Mapping, Sized
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

import msgpack
from pydantic import JsonValue, ValidationError

from streamrl.producers.prompts.gym import GymDataset, open_dataset
from streamrl.producers.prompts.settings import PLACEHOLDER, DataSettings
from streamrl.producers.prompts.tables import column_map, open_table
from streamrl.schemas.errors import DataError
from streamrl.schemas.identifiers import make_prompt_id
from streamrl.schemas.import_path import load_function
from streamrl.schemas.trajectories import ChatTurn, Prompt

MAX_PROMPT_BYTES = 2 << 20
"""Most bytes of a prompt with its columns: half of a work order's limit, so that every prompt fits into one."""
MAX_FILTER_ATTEMPTS = 100
"""Entries tried for a position until the filter accepts one. A filter that accepts fewer than 1 in 100 is taken to be a
mistake."""
PASS_SIZE = 10_000
"""Prompts in one pass over generated prompts."""
_TUPLE_GRIDS = {"arc_agi", "rearc"}
"""Data sets whose scorers expect tuples, which JSON turns into lists; the others also accept lists."""
Filter = Callable[[dict[str, Any]], bool]


class PromptSource(Protocol):
    """Prompts by position. The cursor of a run is therefore one integer."""

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position (0, 1, 2 …), and the position's pass over the data (0, 1, 2 …).

        The same settings, seed and position give the same prompt; positions never end. Blocks while the entry is made.

        Raises:
            DataError: the prompt cannot be made.
        """
        ...


def open_source(settings: DataSettings, *, run_seed: int = 0) -> PromptSource:
    """The source that the settings name; ``run_seed``: the seed if ``data.seed`` is not set.

    Raises:
        DataError: the data set or file cannot be read, or one of its rows has no prompt.
        SettingsError: the filter cannot be loaded.
    """
    if settings.requests_only:
        raise DataError(
            "expected a run with prompts, got data.requests_only, with which there are none; this process is not needed"
        )
    seed = run_seed if settings.seed is None else settings.seed
    if settings.path is not None:
        return StoredSource(settings, settings.path, seed)
    return ReasoningGymSource(settings, seed)


def first_prompts(source: PromptSource, most: int) -> list[Prompt]:
    """The prompts at the first positions of a source, at most one pass.

    Raises:
        DataError: see ``PromptSource``.
    """
    count = min(most, len(source)) if isinstance(source, Sized) else most
    return [source.prompt_at(position)[0] for position in range(count)]


class StoredSource:
    """Prompts from a table, shuffled again in every pass. Memory: about 16 bytes per row, of any size.

    Every row is read once at the start, so that a malformed row is found before the run starts. Prompts are named by
    their line or row, so names do not depend on the seed or the filter.
    """

    def __init__(self, settings: DataSettings, path: str, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._columns = column_map(settings)
        self._table = open_table(settings, path)
        self._kept = self._accepted()
        # The order of one pass is cached. Positions come in order, so it changes once every len(self) positions.
        self._shuffled: tuple[int, array[int]] = (-1, array("Q"))

    def __len__(self) -> int:
        return len(self._kept)

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position, and the position's pass over the table.

        Raises:
            DataError: the table changed since it was opened, or the prompt is too large.
        """
        # The row at `place` in the order of its pass.
        data_pass, place = divmod(position, len(self._kept))
        index = self._order_of(data_pass)[place]
        where = self._table.where(index)
        content, columns = self._columns.split_row(self._table.read(index), where)
        prompt = make_prompt(
            self._settings,
            dataset=self._table.name,
            index=self._table.number(index),
            content=content,
            columns=columns,
            where=where,
        )
        return prompt, data_pass

    def _accepted(self) -> "array[int]":
        accepts = load_filter(self._settings.filter)
        # A filter may read any column. Without a filter only the columns of prompt and answer are read.
        needed = self._columns.read if self._settings.filter is None else None
        kept = array("Q")
        for index, row in enumerate(self._table.scan(needed)):
            try:
                content, columns = self._columns.split_row(row, self._table.where(index))
            except DataError:
                # Repeat with all of the row's columns, so that the error names those that exist.
                self._columns.split_row(self._table.read(index), self._table.where(index))
                raise
            if accepts({**columns, "prompt": content}):
                kept.append(index)
        if not kept:
            accepted = "" if self._settings.filter is None else f" that {self._settings.filter} (data.filter) accepts"
            raise DataError(
                f"expected at least one prompt in {self._settings.path}{accepted}, "
                f"got none among {len(self._table)} rows"
            )
        return kept

    def _order_of(self, data_pass: int) -> "array[int]":
        if self._shuffled[0] != data_pass:
            order = array("Q", self._kept)
            # Seeded with text, which random hashes with SHA-512: similar seeds and passes give unrelated orders.
            random.Random(f"{self._seed}/{data_pass}").shuffle(order)
            self._shuffled = (data_pass, order)
        return self._shuffled[1]


class ReasoningGymSource:
    """Prompts that reasoning-gym generates: one data set, or a weighted mixture of several.

    Every pass has ``size`` prompts. If the filter refuses an entry, the entry at the same index of another instance of
    the data set is used. That instance's seed is higher by ``size``, so no two positions of a pass share an entry.
    """

    def __init__(self, settings: DataSettings, seed: int, size: int = PASS_SIZE) -> None:
        self._settings = settings
        self._seed = seed
        self._size = size
        self._accepts = load_filter(settings.filter)
        self._names = tuple(settings.parts)
        self._bounds = tuple(accumulate(part.weight for part in settings.parts.values()))
        self._datasets: dict[tuple[str, int], GymDataset] = {}
        # Open all parts now, so that a wrong name or option fails at the start and not at the first prompt of the part.
        for name in self._names:
            self._dataset(name, 0)

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position, and the position's pass over the data.

        Raises:
            DataError: the filter refuses too many entries, or the data set fails.
        """
        data_pass, index = divmod(position, self._size)
        name = self._dataset_at(index)
        # Attempt 0 is the data set itself; the seed of each further attempt is higher by one size.
        for attempt in range(MAX_FILTER_ATTEMPTS):
            entry = self._entry(name, attempt, index)
            if self._accepts(entry):
                return self._prompt(name, attempt * self._size + index, entry), data_pass
        raise DataError(
            f"expected {self._settings.filter} to accept one of {MAX_FILTER_ATTEMPTS} entries of {name!r} "
            f"at position {position}, got none; loosen the filter or the options"
        )

    def _prompt(self, name: str, index: int, entry: dict[str, Any]) -> Prompt:
        columns = {"answer": entry["answer"], "metadata": entry["metadata"]}
        return make_prompt(self._settings, dataset=name, index=index, content=entry["question"], columns=columns)

    def _dataset_at(self, index: int) -> str:
        """The part at an index, drawn by weight from seed and index only."""
        drawn = random.Random(f"{self._seed}/{index}").random() * self._bounds[-1]
        return self._names[min(bisect(self._bounds, drawn), len(self._names) - 1)]

    def _dataset(self, name: str, attempt: int) -> GymDataset:
        if (name, attempt) not in self._datasets:
            options, seed = self._settings.parts[name].options, self._seed + attempt * self._size
            self._datasets[name, attempt] = open_dataset(name, options, size=self._size, seed=seed)
        return self._datasets[name, attempt]

    def _entry(self, name: str, attempt: int, index: int) -> dict[str, Any]:
        dataset = self._dataset(name, attempt)
        try:
            return dataset[index]
        except Exception as error:
            raise DataError(f"expected an entry at index {index} of data set {name!r}, got: {error!r}") from error


def load_filter(path: str | None) -> Filter:
    """The function that ``data.filter`` names; without a name, one that accepts every entry.

    Raises:
        SettingsError: it cannot be loaded.
    """
    if path is None:
        return lambda entry: True
    function = load_function(path)

    def accepts(entry: dict[str, Any]) -> bool:
        try:
            return bool(function(entry))
        except Exception as error:
            raise DataError(f"expected true or false from data.filter {path}, got an exception: {error!r}") from error

    return accepts


def make_prompt(
    settings: DataSettings,
    *,
    dataset: str,
    index: int,
    content: Any,
    columns: Mapping[str, Any],
    where: str | None = None,
) -> Prompt:
    """The prompt at an index of a data set, with the wording of the settings; ``where``: its place, for errors.

    Raises:
        DataError: the content is neither text nor chat turns, or the prompt is too large for the bus.
    """
    prompt_id = make_prompt_id(dataset, index)
    where = where or prompt_id
    try:
        prompt = Prompt(
            prompt_id=prompt_id,
            dataset=dataset,
            content=_worded(settings, content, where),
            columns={str(name): json_safe(value) for name, value in columns.items()},
        )
        # Measured as it is sent: columns count too.
        size = len(msgpack.packb(prompt.model_dump()))
    except (ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"expected a valid prompt at {where}, got: {error}") from error
    if size > MAX_PROMPT_BYTES:
        raise DataError(f"expected at most {MAX_PROMPT_BYTES} bytes of prompt and columns at {where}, got {size}")
    return prompt


def _worded(settings: DataSettings, content: Any, where: str) -> str | tuple[ChatTurn, ...]:
    system = () if settings.system_prompt is None else (ChatTurn(role="system", content=settings.system_prompt),)
    if isinstance(content, str):
        text = settings.prompt_template.replace(PLACEHOLDER, content)
        as_chat = settings.conversational or settings.system_prompt is not None
        return (*system, ChatTurn(role="user", content=text)) if as_chat else text
    if not isinstance(content, list) or not content:
        raise DataError(f"expected text or a list of chat turns as prompt at {where}, got {type(content).__name__}")
    # A system turn of the data set takes precedence over that of the settings.
    turns = tuple(ChatTurn.model_validate(turn) for turn in content)
    return turns if turns[0].role == "system" else (*system, *turns)


def json_safe(value: Any) -> JsonValue:
    """The value in JSON's types: tuples and sets become lists, keys text, numpy values plain; others become text."""
    match value:
        case Enum():
            return json_safe(value.value)
        # Before int, because bool is a subclass of int.
        case None | bool():
            return value
        # msgpack holds 64 bits. A larger number becomes text, which is better than an error.
        case int():
            return int(value) if -(2**63) <= value < 2**64 else str(value)
        # The difference is NaN for NaN and both infinities, which JSON cannot represent.
        case float():
            return float(value) if value - value == 0 else str(value)
        case str():
            return str(value)
        case Mapping():
            return {str(key): json_safe(item) for key, item in value.items()}
        case list() | tuple():
            return [json_safe(item) for item in value]
        # Sorted, because a set's order differs between processes, and a position names one prompt in all of them.
        case set() | frozenset():
            return [json_safe(item) for item in sorted(value, key=repr)]
        # Scalars and arrays of numpy and torch, without importing the libraries.
        case _ if hasattr(value, "tolist"):
            return json_safe(value.tolist())
        case _:
            return str(value)


def scoring_entry(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that ``score_answer`` of the prompt's reasoning-gym data set expects, from ``Prompt.columns``."""
    metadata = dict(columns["metadata"])
    if metadata.get("source_dataset") in _TUPLE_GRIDS:
        grids = {name: tuple(map(tuple, metadata[name])) for name in ("input", "output") if name in metadata}
        metadata |= grids
    return {"answer": columns["answer"], "metadata": metadata}
