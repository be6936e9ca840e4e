"""Which of a row's columns is the prompt, which the answer, and what the rewards get. Reads no files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from producers.prompts.settings import DataSettings
from schemas.errors import DataError

ANSWER = "answer"
_MISSING = object()


@dataclass(frozen=True)
class ColumnMap:
    """Paths of prompt and answer, parts of nested columns joined by dots.

    ``needs_answer``: a row without one is an error; otherwise it goes on without.
    """

    prompt: str
    answer: str
    needs_answer: bool = True

    @property
    def read(self) -> frozenset[str]:
        """Top-level columns that prompt and answer may come from."""
        return frozenset(name for path in (self.prompt, self.answer) for name in (path, path.split(".")[0]))

    def parted(self, row: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
        """The prompt (text, or a list of turns) and the columns for the rewards, the answer as ``answer``.

        A mapped column loses its own name; one that holds more than the mapped value stays.

        Raises:
            DataError: there is no prompt or answer where the map says, or the prompt has another shape.
        """
        prompt = _checked_prompt(_at(row, self.prompt), self.prompt, row, where)
        answer = _at(row, self.answer)
        if answer is _MISSING and self.needs_answer:
            raise _missing(f"an answer in column {self.answer!r}", row, where, "data.answer_column")
        columns = {name: value for name, value in row.items() if name not in (self.prompt, self.answer)}
        return prompt, columns if answer is _MISSING else columns | {ANSWER: answer}


FORMATS = {
    "trl": ColumnMap("prompt", ANSWER, needs_answer=False),
    "verl": ColumnMap("prompt", "reward_model.ground_truth"),
    "openrlhf": ColumnMap("input", "label", needs_answer=False),
}


def column_map(settings: DataSettings) -> ColumnMap:
    """The format's columns, with those that are given by name in their place."""
    preset = FORMATS[settings.format]
    return ColumnMap(
        settings.prompt_column or preset.prompt,
        settings.answer_column or preset.answer,
        preset.needs_answer or settings.answer_column is not None,
    )


def _at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path; a column whose own name has dots comes first."""
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
    wrong = _what_is_wrong(prompt)
    if wrong:
        raise DataError(f"expected text or a list of {{role, content}} in column {path!r} of {where}, got {wrong}")
    return prompt


def _what_is_wrong(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "an empty text"
    if not isinstance(prompt, list):
        return "nothing" if prompt is None else type(prompt).__name__
    for number, turn in enumerate(prompt, start=1):
        if not isinstance(turn, Mapping):
            return f"{type(turn).__name__} as turn {number}"
        if wrong := [key for key in ("role", "content") if not isinstance(turn.get(key), str)]:
            return f"turn {number} without text as {' and '.join(wrong)}"
    return None if prompt else "an empty list"


def _missing(what: str, row: Mapping[str, Any], where: str, setting: str) -> DataError:
    return DataError(f"expected {what} of {where}, got columns {sorted(map(str, row))}; set {setting} or data.format")
