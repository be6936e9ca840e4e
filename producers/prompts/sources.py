"""Sources of the dispatcher's prompts: reasoning-gym data sets, or tables of stored rows, read by position.

Invariants:
- a_position_names_one_prompt: the same settings, seed and position give the same prompt, in every process and at any
  time. So the cursor of a run is one integer, and a restart needs no copy of the prompts that were read;
- positions_never_end: each pass over the data is followed by another, in a new order or with a new seed;
- a_row_that_cannot_be_sent_is_left_out: a prompt that no order can carry is found when the data is opened, by the
  limits of the orders themselves. It is reported with its place and reason, and ends no run.
"""

import random
from array import array
from base64 import b64encode
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from contextlib import suppress
from enum import Enum
from itertools import accumulate, islice
from typing import Any, Protocol

import structlog
from pydantic import JsonValue, ValidationError

from streamrl.producers.prompts.columns import column_map
from streamrl.producers.prompts.conversations import TOOLS, VARIABLES, NotWhole, tools_in, without_nothing
from streamrl.producers.prompts.gym import GymDataset, open_dataset
from streamrl.producers.prompts.settings import PLACEHOLDER, DataSettings
from streamrl.producers.prompts.tables import open_table
from streamrl.schemas.codec import size_of_part
from streamrl.schemas.errors import DataError, FrameTooLarge
from streamrl.schemas.identifiers import make_prompt_id
from streamrl.schemas.import_path import load_function
from streamrl.schemas.trajectories import Prompt

log = structlog.get_logger()

MAX_PROMPT_BYTES = 2 << 20
"""Most bytes of a prompt with its columns: half of a work order's limit, so that every prompt fits into one."""
MAX_PROMPT_VALUES = 100_000
"""Most values in a prompt and its columns. A work order may have 120,000; its other fields need the rest."""
NOT_UNICODE = "text that is not Unicode (half of a surrogate pair)"
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


class UnsendablePrompt(DataError):
    """A prompt that no work order can carry. The text has its place and the reason."""


def open_source(settings: DataSettings, *, run_seed: int = 0, rewards: Collection[str] = ()) -> PromptSource:
    """The source that the settings name.

    ``run_seed``: the seed if ``data.seed`` is not set. ``rewards``: the run's reward functions. Some of them refuse
    answers that they cannot compare.

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
        return StoredSource(settings, settings.path, seed, rewards)
    return ReasoningGymSource(settings, seed)


def first_prompts(source: PromptSource, most: int) -> list[Prompt]:
    """The prompts at the first positions of a source, at most one pass.

    Raises:
        DataError: see ``PromptSource``.
    """
    count = min(most, len(source)) if isinstance(source, Sized) else most
    return [source.prompt_at(position)[0] for position in range(count)]


SCANNED_ROWS = 100_000
"""Rows of the training data that are compared with held-out prompts before a start, in about a second."""


def shared_with(settings: DataSettings, prompts: Iterable[Prompt]) -> list[str]:
    """Ids of the prompts that the first ``SCANNED_ROWS`` rows of ``settings``' stored data have, too.

    Raises:
        DataError: the data cannot be read.
    """
    table, columns = open_table(settings, str(settings.path)), column_map(settings)
    scanned = islice(table.scan(), SCANNED_ROWS)
    rows = (columns.split_row(row, table.where(index))[0] for index, row in enumerate(scanned))
    said = set(map(_said_in, rows))
    return [prompt.prompt_id for prompt in prompts if _said_in(prompt.stated or prompt.content) in said]


def _said_in(content: Any) -> Any:
    """A prompt as a key: its text, also if that is the only turn, or roles and texts of its turns."""
    if isinstance(content, str):
        return content.strip()
    turns = tuple(
        (turn["role"], turn["content"].strip())
        for turn in (each if isinstance(each, Mapping) else each.model_dump() for each in content)
    )
    return turns[0][1] if len(turns) == 1 else turns


class StoredSource:
    """Prompts from a table, shuffled again in every pass. Memory: about 16 bytes per row, of any size.

    Every row is read once at the start, so that a malformed row is found before the run starts. Prompts are named by
    their line or row, so names do not depend on the seed or the filter. ``left_out`` says in one line how many rows are
    left out, and why the first of them is; it is empty if none is. ``binary``: names of the columns that hold bytes.
    """

    def __init__(self, settings: DataSettings, path: str, seed: int, rewards: Collection[str] = ()) -> None:
        self._settings = settings
        self._seed = seed
        self._columns = column_map(settings, rewards)
        self._table = open_table(settings, path)
        self.left_out = ""
        self.binary: set[str] = set()
        # All columns of the kept rows. A row that lacks one gets it without a value, as in files with a fixed schema.
        self._names: dict[str, JsonValue] = {}
        self._kept = self._accepted()
        # The order of one pass is cached. Positions come in order, so it changes once every len(self) positions.
        self._shuffled: tuple[int, array[int]] = (-1, array("Q"))

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that rewards get."""
        return sorted(self._names)

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position, and the position's pass over the table.

        Raises:
            DataError: the table changed since it was opened, or the prompt is too large.
        """
        # The row at `place` in the order of its pass.
        data_pass, place = divmod(position, len(self._kept))
        index = self._order_of(data_pass)[place]
        content, columns = self._columns.split_row(self._table.read(index), self._table.where(index))
        prompt = self._prompt(index, content, columns)
        return prompt.model_copy(update={"columns": self._names | prompt.columns}), data_pass

    def _prompt(self, index: int, content: Any, columns: Mapping[str, Any]) -> Prompt:
        return make_prompt(
            self._settings,
            dataset=self._table.name,
            index=self._table.number(index),
            content=content,
            columns=columns,
            where=self._table.where(index),
        )

    def _accepted(self) -> "array[int]":
        accepts = load_filter(self._settings.filter)
        kept, left_out, first = array("Q"), 0, ""
        for index, row in enumerate(self._table.scan()):
            content, columns = self._columns.split_row(row, self._table.where(index))
            if not accepts({**columns, "prompt": content}):
                continue
            try:
                self._prompt(index, content, columns)
            except UnsendablePrompt as error:
                left_out, first = left_out + 1, first or str(error)
            else:
                self._names.update(dict.fromkeys(columns))
                self.binary.update(name for name, value in columns.items() if _holds_bytes(value))
                kept.append(index)
        if left_out:
            self.left_out = f"{left_out} of {len(self._table)} rows are left out; the first: {first}"
            log.warning("rows of the data are left out", count=left_out, first=first)
        if not kept:
            accepted = "" if self._settings.filter is None else f" that {self._settings.filter} (data.filter) accepts"
            raise DataError(
                f"expected at least one prompt in {self._settings.path}{accepted}, got none among {len(self._table)} "
                f"rows{'; ' * bool(left_out)}{self.left_out}"
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
                with suppress(UnsendablePrompt):
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
        given = dict(entry)
        try:
            said = function(entry)
            accepted = bool(said)
        except Exception as error:
            raise DataError(f"expected true or false from data.filter {path}, got an exception: {error!r}") from error
        if isinstance(said, str):
            raise DataError(f"expected true or false from data.filter {path}, got a text: {said:.80}")
        if entry.keys() != given.keys() or any(entry[name] is not given[name] for name in given):
            raise DataError(
                f"expected data.filter {path} to leave entries as they are, got one that it changed: it only chooses; "
                "write changed data to a file"
            )
        return accepted

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
        UnsendablePrompt: the prompt is too large for the bus, or is not valid Unicode.
        DataError: the content is neither text nor chat turns, or a setting does not fit it.
    """
    prompt_id = make_prompt_id(dataset, index)
    where = where or prompt_id
    worded, stated = _worded(settings, content, where)
    columns = _with_tools(settings, columns, where, is_chat=not isinstance(worded, str))
    _refuse_variables(settings, columns, where)
    try:
        prompt = Prompt(
            prompt_id=prompt_id,
            dataset=dataset,
            content=worded,
            stated=stated,
            columns={str(name): json_safe(value) for name, value in columns.items()},
        )
        # The size on the wire: columns count too.
        size = size_of_part(prompt, MAX_PROMPT_VALUES)
    except ValidationError as error:
        raise UnsendablePrompt(f"expected a valid prompt at {where}, got {_fault_in(error)}") from error
    except UnicodeEncodeError as error:
        raise UnsendablePrompt(f"expected a valid prompt at {where}, got in a column: {NOT_UNICODE}") from error
    except (ValueError, OverflowError, RecursionError, FrameTooLarge) as error:
        raise UnsendablePrompt(f"expected a valid prompt at {where}, got: {error}") from error
    if size > MAX_PROMPT_BYTES:
        raise UnsendablePrompt(
            f"expected at most {MAX_PROMPT_BYTES} bytes of prompt and columns at {where}, got {size}"
        )
    return prompt


def _fault_in(error: ValidationError) -> str:
    """The first fault that a message's schema finds, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    # The names after these are those of the schema's types.
    at = ".".join(map(str, first["loc"][: 2 if first["loc"][0] == "columns" else 1]))
    return f"in {at}: {NOT_UNICODE if first['type'] == 'string_unicode' else first['msg']}"


def _worded(settings: DataSettings, content: Any, where: str) -> tuple[Any, Any]:
    """The prompt for the model, and the prompt in the data, in the same form; None if both are the same.

    Raises:
        DataError: a setting does not fit the prompt.
    """
    system = [] if settings.system_prompt is None else [{"role": "system", "content": settings.system_prompt}]
    if isinstance(content, str):
        text = settings.prompt_template.replace(PLACEHOLDER, content)
        if settings.conversational or system:
            stated = [{"role": "user", "content": content}]
            worded = [*system, {"role": "user", "content": text}]
            return worded, None if worded == stated else stated
        return text, None if text == content else content
    if not isinstance(content, list) or not content:
        raise DataError(f"expected text or a list of chat turns as prompt at {where}, got {type(content).__name__}")
    if settings.prompt_template != PLACEHOLDER:
        raise DataError(
            f"expected a text as prompt at {where}, because data.prompt_template words texts, got a list of turns; put "
            "the wording into the turns, and leave the setting out"
        )
    turns: list[Any] = [json_safe(turn) for turn in content]
    if not system:
        return turns, None
    if any(isinstance(turn, Mapping) and turn.get("role") == "system" for turn in content):
        raise DataError(
            f"expected chat turns without a system turn at {where}, because data.system_prompt adds one, got turns "
            "with one; leave the setting out"
        )
    return [*system, *turns], turns


def _with_tools(settings: DataSettings, columns: Mapping[str, Any], where: str, *, is_chat: bool) -> Mapping[str, Any]:
    """The columns, with tools for the chat template as a list.

    Raises:
        DataError: the tools cannot be described to the model.
    """
    try:
        tools = tools_in(columns.get(TOOLS))
    except NotWhole as error:
        if not is_chat:
            return columns  # of another meaning, for the rewards
        raise DataError(
            f"expected a list of JSON schemas in column {TOOLS!r} of {where}, which the chat template describes to the "
            f"model, got {error}"
        ) from error
    if tools and not is_chat:
        raise DataError(
            f"expected chat turns at {where}, because its column {TOOLS!r} describes tools to the model, got a text; "
            "set data.conversational = true"
        )
    if tools and TOOLS in settings.chat_template_kwargs:
        raise DataError(
            f"expected no column {TOOLS!r} at {where}, because data.chat_template_kwargs has tools for all prompts, "
            "got one; leave the setting out"
        )
    return {**columns, TOOLS: tools} if tools else columns


def _refuse_variables(settings: DataSettings, columns: Mapping[str, Any], where: str) -> None:
    """Refuse a row that wants other variables of the chat template than the settings give to all rows.

    Raises:
        DataError: it does.
    """
    given = without_nothing(columns.get(VARIABLES))
    if given and given != settings.chat_template_kwargs:
        raise DataError(
            f"expected no column {VARIABLES!r} at {where}, because the chat template gets the variables of "
            f"data.chat_template_kwargs in every row, got {given}; set data.chat_template_kwargs to it"
        )


def json_safe(value: Any) -> JsonValue:
    """The value in JSON's types: tuples and sets become lists, keys text, numpy values plain.

    Bytes become base64, all others text.
    """
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
        case bytes() | bytearray():
            return b64encode(value).decode()
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


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_bytes, value.values()))
    return any(map(_holds_bytes, value)) if isinstance(value, list) else isinstance(value, bytes)


def scoring_entry(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that ``score_answer`` of the prompt's reasoning-gym data set expects, from ``Prompt.columns``."""
    metadata = dict(columns["metadata"])
    if metadata.get("source_dataset") in _TUPLE_GRIDS:
        grids = {name: tuple(map(tuple, metadata[name])) for name in ("input", "output") if name in metadata}
        metadata |= grids
    return {"answer": columns["answer"], "metadata": metadata}
