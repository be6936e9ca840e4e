"""Conversations in a row: its turns as the chat template gets them, and the tools that it describes.

A conversation is passed on whole, or refused by the name of the part that cannot be passed on. Keys without a value are
left out. Arrow files give every turn all keys of all turns, so a key there says nothing unless it has a value.
"""

import json
import re
from ast import literal_eval
from collections.abc import Mapping
from typing import Any

_LIKE_TURNS = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:")
"""Start of a text that is a list of turns, written by JSON, or by Python, which JSON cannot read."""
_PARTS = re.compile(r"\s*\[\s*\{\s*['\"]type['\"]\s*:\s*['\"](text|image|image_url)['\"]")
"""Start of a text that is a list of content parts."""
_LIKE_MAPPINGS = re.compile(r"\s*(?:\[\s*)?\{\s*['\"]")
_KEYS_OF_TURNS = ({"role", "content"}, {"messages"}, {"conversations"}, {"from", "value"})
"""Keys by which one recognises a conversation."""
_ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = ("human", "gpt", "bot", "ai", "chatgpt")
"""Roles of other formats. Many templates write down any role, so the model would see one that it never saw."""
TOOLS = "tools"
"""Column with the tools of a conversation: JSON schemas, as a list or as its JSON text. TRL has the same name."""
VARIABLES = "chat_template_kwargs"
"""Column with variables of the chat template for one row, in TRL. A run has one set of them for all rows."""


class NotWhole(ValueError):
    """A part of a conversation that cannot be passed on. The text goes after "got"."""


def turns_in(prompt: Any) -> str | list[dict[str, Any]]:
    """A prompt as text, or as turns with text for ``role`` and ``content``.

    A text that is a JSON list of turns is read as those turns: csv files cannot hold a list.

    Raises:
        NotWhole: it is neither, or a turn has a part that is not text.
    """
    if isinstance(prompt, str):
        if _is_blank(prompt):
            raise NotWhole("an empty text")
        if _PARTS.match(prompt):
            raise NotWhole("a list of content parts as text; put it into a turn, or join the parts' texts")
        if not _LIKE_TURNS.match(prompt) and not _has_turns(prompt):
            return prompt
        try:
            prompt = json.loads(prompt)
        except ValueError as error:
            raise NotWhole(f"a list of turns as text that is not JSON ({error}); write it with json.dumps") from error
    if not isinstance(prompt, list):
        raise NotWhole("nothing" if prompt is None else type(prompt).__name__)
    if not prompt:
        raise NotWhole("an empty list")
    turns = [_turn(turn, number) for number, turn in enumerate(prompt, start=1)]
    if turns[-1]["role"] == "system":
        raise NotWhole(f"a turn of role system as the last turn ({len(turns)})")
    if turns[-1]["role"] == "user" and _is_blank(turns[-1]["content"]):
        raise NotWhole(f"an empty text as turn {len(turns)}")
    return turns


def _is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has only spaces, and characters of no width."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def _has_turns(text: str) -> bool:
    """Whether a text is a turn, a list of turns or a mapping with one, as JSON or Python writes it."""
    if not _LIKE_MAPPINGS.match(text):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return False
    first = found[0] if isinstance(found, list) and found else found
    return isinstance(first, dict) and any(keys <= first.keys() for keys in _KEYS_OF_TURNS)


def _turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise NotWhole(f"{type(turn).__name__} as turn {number}")
    kept: dict[str, Any] = without_nothing(turn)
    calls = kept.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise NotWhole(f"turn {number} with {type(calls).__name__} as tool_calls; give a list of {{function}}")
    if not calls:
        kept.pop("tool_calls", None)
    else:
        kept.setdefault("content", "")  # a turn that only calls tools says nothing
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(_text_of(part, number) for part in kept["content"])
    if wrong := [key for key in ("role", "content") if not isinstance(kept.get(key), str)]:
        raise NotWhole(f"turn {number} without text as {' and '.join(wrong)}")
    if _PARTS.match(kept["content"]):
        raise NotWhole(f"turn {number} with its parts of content as text; give them as a list, or join their texts")
    plain = kept["role"].strip().lower()
    if not plain or plain in _OTHER_ROLES or (plain in _ROLES and plain != kept["role"]):
        raise NotWhole(f"turn {number} of role {kept['role']!r}; give one that the template knows: {', '.join(_ROLES)}")
    return kept


def _text_of(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise NotWhole(f"turn {number} with a part of type {kind}; the prompts of this loop are text")


def without_nothing(value: Any) -> Any:
    """The value without the keys that have no value, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nothing(item) for key, item in value.items() if item is not None}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value


def tools_in(value: Any) -> list[dict[str, Any]]:
    """The tools that a column describes; empty if it has none.

    Raises:
        NotWhole: the column has something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise NotWhole(f"text that is not JSON ({error})") from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise NotWhole(type(value).__name__)
    if other := [tool for tool in value if not isinstance(tool, Mapping)]:
        raise NotWhole(f"{type(other[0]).__name__} in it")
    return [without_nothing(tool) for tool in value]
