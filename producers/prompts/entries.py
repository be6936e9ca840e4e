"""From a data set's entry to a ``Prompt``, and back to the entry a reasoning-gym scorer wants.

It does not know where entries come from, nor how prompts become tokens.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgpack
from pydantic import JsonValue, ValidationError

from producers.prompts.settings import PLACEHOLDER, DataSettings
from schemas.errors import DataError
from schemas.identifiers import make_prompt_id
from schemas.trajectories import ChatTurn, Prompt

MAX_PROMPT_BYTES = 2 << 20
"""Half of what a work order may weigh, so that every prompt fits into one."""

_GRIDS_OF_TUPLES = {"arc_agi", "rearc"}
"""Data sets whose scorers compare with tuples, which JSON turns into lists; all others score lists alike."""


def make_prompt(
    settings: DataSettings,
    *,
    dataset: str,
    index: int,
    content: Any,
    columns: Mapping[str, Any],
    where: str | None = None,
) -> Prompt:
    """The prompt at an index of a data set, worded as the settings say; ``where``: its place in an error's words.

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
        size = len(msgpack.packb(prompt.model_dump()))
    except (ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"expected a prompt that can be sent at {where}, got: {error}") from error
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
    turns = tuple(ChatTurn.model_validate(turn) for turn in content)
    return turns if turns[0].role == "system" else (*system, *turns)


def json_safe(value: Any) -> JsonValue:
    """The value in JSON's types: tuples and sets become lists, keys text, numpy scalars plain, others their text."""
    match value:
        case Enum():
            return json_safe(value.value)
        case None | bool():
            return value
        case int():
            return int(value) if -(2**63) <= value < 2**64 else str(value)
        case float():
            return float(value) if value - value == 0 else str(value)
        case str():
            return str(value)
        case Mapping():
            return {str(key): json_safe(item) for key, item in value.items()}
        case list() | tuple():
            return [json_safe(item) for item in value]
        case set() | frozenset():
            return [json_safe(item) for item in sorted(value, key=repr)]
        case _ if hasattr(value, "tolist"):
            return json_safe(value.tolist())
        case _:
            return str(value)


def scoring_entry(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that ``score_answer`` of the prompt's reasoning-gym data set expects, from ``Prompt.columns``."""
    metadata = dict(columns["metadata"])
    if metadata.get("source_dataset") in _GRIDS_OF_TUPLES:
        grids = {name: tuple(map(tuple, metadata[name])) for name in ("input", "output") if name in metadata}
        metadata |= grids
    return {"answer": columns["answer"], "metadata": metadata}
