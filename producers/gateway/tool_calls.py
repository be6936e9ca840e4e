"""Parsers of tool calls in a model's text, one for each way in which models write them.

``hermes`` (``<tool_call>{...}</tool_call>``, as Hermes, Qwen and others do) and ``json`` (the whole answer is a call or
a list of calls) are built in. If vLLM is installed, its parsers are available under their names.
"""

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.producers.gateway.requests import ToolDefinition

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function. ``arguments``: JSON, as text."""

    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """The call in OpenAI's shape, with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ParsedReply:
    """An answer's calls in their order, and its text without them."""

    content: str
    calls: tuple[FunctionCall, ...]


class ToolCallParser(Protocol):
    """Finds tool calls as one kind of model writes them."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Strings at which a call may start. Text from there on is held back until the answer is complete."""
        ...

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> ParsedReply:
        """The calls and the text of a complete answer. An answer with an invalid call is all text."""
        ...


class HermesToolCalls:
    """Calls as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one element for each call."""

    openers: tuple[str, ...] = ("<tool_call>",)

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> ParsedReply:
        """See ``ToolCallParser``."""
        calls = [call for found in _HERMES.finditer(text) if (call := _call(_json(found[1]), tools)) is not None]
        # If one call cannot be parsed, the whole answer is text, so that the requester sees what the model wrote.
        if not calls or len(calls) != text.count("<tool_call>"):
            return ParsedReply(text, ())
        return ParsedReply(_HERMES.sub("", text).strip(), tuple(calls))


class JsonToolCalls:
    """Calls as a JSON object of ``name`` and ``arguments`` (or ``parameters``), or a list of them, and nothing else."""

    openers: tuple[str, ...] = ("{", "[")

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> ParsedReply:
        """See ``ToolCallParser``."""
        value = _json(text)
        found = [_call(one, tools) for one in (value if isinstance(value, list) else [value])]
        calls = [call for call in found if call is not None]
        if not calls or len(calls) != len(found):
            return ParsedReply(text, ())
        return ParsedReply("", tuple(calls))


class VllmToolCalls:
    """One of vLLM's parsers, on complete answers. It does not say where calls may start, so all text is held back."""

    openers: tuple[str, ...] = ("",)

    def __init__(self, extract: Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]) -> None:
        self._extract = extract

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> ParsedReply:
        """See ``ToolCallParser``."""
        content, calls = self._extract(text, [tool.model_dump(exclude_none=True) for tool in tools])
        return ParsedReply(content, tuple(FunctionCall(name, arguments) for name, arguments in calls))


BUILT_IN: dict[str, Callable[[], ToolCallParser]] = {"hermes": HermesToolCalls, "json": JsonToolCalls}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, tools: Sequence[ToolDefinition]) -> FunctionCall | None:
    """The call that a JSON value describes; None if it is no call of one of the tools."""
    if not isinstance(value, dict) or value.get("name") not in {tool.function.name for tool in tools}:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON into JSON
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return None
    return FunctionCall(value["name"], json.dumps(arguments, ensure_ascii=False))
