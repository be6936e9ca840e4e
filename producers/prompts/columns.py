"""The columns of prompt and answer, and what an answer may be.

Invariant answers_keep_their_written_form: an answer reaches the rewards with the spelling that the data has. A row
whose answer has no one spelling is refused, with its place and the answer's type. A number such as 84.0 or a date can
be written in several ways, and a reward that compares text would compare with the wrong one.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.producers.prompts.conversations import NotWhole, turns_in, without_nothing
from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.errors import DataError

ANSWER = "answer"
COMPARING = ("math_verify", "exact_match")
"""Built-in rewards that compare the completion with the answer. They read a text, an integer, or a list of these, of
which any is right."""
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a user's reward function that are not columns, as in TRL."""
MAX_SHOWN = 80
"""Most characters of an answer in a message."""
_MISSING = object()


@dataclass(frozen=True)
class ColumnMap:
    """Column paths of prompt and answer; the parts of a nested column are joined by dots.

    ``needs_answer``: whether a row without an answer is an error. ``compared_by``: the built-in reward that compares
    answers, if the run has one. ``reserved``: names that no column for the rewards may have.
    """

    prompt: str
    answer: str
    needs_answer: bool = True
    compared_by: str | None = None
    reserved: tuple[str, ...] = ()

    def split_row(self, row: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
        """The prompt (text, or a list of turns) and the columns for the rewards, the answer as ``answer``.

        Mapped columns are not among the columns for the rewards; the parent of a mapped nested value is.

        Raises:
            DataError: the prompt or answer is missing, or has another shape.
        """
        prompt = _at(row, self.prompt)
        if prompt is _MISSING:
            raise _missing(f"a prompt in column {self.prompt!r}", row, where, "data.prompt_column")
        try:
            prompt = turns_in(prompt)
        except NotWhole as error:
            expected = f"text or a list of {{role, content}} in column {self.prompt!r} of {where}"
            raise DataError(f"expected {expected}, got {error}") from error
        answer = _at(row, self.answer)
        if answer is _MISSING and self.needs_answer:
            raise _missing(f"an answer in column {self.answer!r}", row, where, "data.answer_column")
        # The parent of a nested value stays, because rewards may need its other values.
        columns = {name: value for name, value in row.items() if name not in (self.prompt, self.answer)}
        if taken := [name for name in self.reserved if name in columns]:
            raise DataError(
                f"expected columns with other names than those of a reward function's own arguments in {where}, got "
                f"{taken[0]!r}; rename the column"
            )
        return prompt, columns if answer is _MISSING else columns | {ANSWER: self._checked(answer, where)}

    def _checked(self, answer: Any, where: str) -> Any:
        """The answer. A list or mapping can only be checked if a built-in reward reads it."""
        if answer is None or _is_text(answer):
            return answer
        if isinstance(answer, list | Mapping) and self.compared_by is None:
            return without_nothing(answer)  # Arrow files give the mapping of each row the keys of all rows
        wrong = (
            [one for one in answer if not (one is None or _is_text(one))]
            if isinstance(answer, list) and answer
            else [answer]
        )
        if not wrong:
            return answer
        expected = f"expected text as answer (column {self.answer!r}) of {where}"
        if not isinstance(wrong[0], Mapping | list):
            raise DataError(f"{expected}, got a {type(wrong[0]).__name__}: {_shown(wrong[0])}; give it as text")
        got, inner = "an empty or nested list", ""
        if isinstance(wrong[0], Mapping):
            names = [*map(str, wrong[0])]
            got = f"a mapping of {', '.join(names) or 'nothing'}"
            inner = f", such as {f'{self.answer}.{names[0]}'!r}" if names and wrong[0] is answer else ""
        raise DataError(
            f"{expected}, which {self.compared_by} compares with the completion, got {got}; set data.answer_column to "
            f"texts{inner}, or score with a function of your own"
        )


def _is_text(value: Any) -> bool:
    # An integer has only one written form; a bool is an int in Python, too.
    return isinstance(value, str | int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


FORMATS = {
    "trl": ColumnMap("prompt", ANSWER, needs_answer=False),
    "verl": ColumnMap("prompt", "reward_model.ground_truth"),
    "openrlhf": ColumnMap("input", "label", needs_answer=False),
}


def column_map(settings: DataSettings, rewards: Collection[str] = ()) -> ColumnMap:
    """The format's columns, or those that the settings name; ``rewards``: the run's reward functions."""
    # If the user names an answer column, rows without it are errors. The format's own column may be missing.
    preset = FORMATS[settings.format]
    return ColumnMap(
        settings.prompt_column or preset.prompt,
        settings.answer_column or preset.answer,
        preset.needs_answer or settings.answer_column is not None,
        next((name for name in COMPARING if name in rewards), None),
        ARGUMENTS if any(":" in name for name in rewards) else (),
    )


def _at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a path; a column whose name is the whole path takes precedence."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str):
            value = _object_in(value)
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _object_in(text: str) -> Any:
    """The JSON value in a text, for files whose cells cannot hold a mapping; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _missing(what: str, row: Mapping[str, Any], where: str, setting: str) -> DataError:
    return DataError(f"expected {what} of {where}, got columns {sorted(map(str, row))}; set {setting} or data.format")
