"""Tool calls in a model's text: how it writes them is the model's own affair, and a parser's to know.

``hermes`` (``<tool_call>{...}</tool_call>``, as Hermes, Qwen and others do) and ``json`` (the whole answer is a call or
a list of them) are built in; with vLLM installed, its parsers are there under their names.
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
    """``arguments``: JSON, as text."""

    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """Under an id of its own."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ParsedReply:
    """The text beside the calls, and the calls in their order."""

    content: str
    calls: tuple[FunctionCall, ...]


class ToolCallParser(Protocol):
    """Knows how one kind of model writes its calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts at which a call may begin; before the end nothing is sent from there on."""
        ...

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> ParsedReply:
        """Calls and text of a whole answer; of what is no call, all is text."""
        ...


class HermesToolCalls:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as there are calls."""

    openers: tuple[str, ...] = ("<tool_call>",)

    def parse(self, text: str, tools: Sequence[ToolDefinition]) -> ParsedReply:
        """See ``ToolCallParser``."""
        calls = [call for found in _HERMES.finditer(text) if (call := _call(_json(found[1]), tools)) is not None]
        # One that cannot be read makes all of it text: a requester sees what the model said.
        if not calls or len(calls) != text.count("<tool_call>"):
            return ParsedReply(text, ())
        return ParsedReply(_HERMES.sub("", text).strip(), tuple(calls))


class JsonToolCalls:
    """A JSON object of ``name`` and ``arguments`` (or ``parameters``), or a list of such, and nothing else."""

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
    """One of vLLM's parsers, on whole answers. They know no other sign of a call than their own, so all text waits."""

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
    """A call of one of the tools; none if it is of none."""
    if not isinstance(value, dict) or value.get("name") not in {tool.function.name for tool in tools}:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON into JSON
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return None
    return FunctionCall(value["name"], json.dumps(arguments, ensure_ascii=False))
