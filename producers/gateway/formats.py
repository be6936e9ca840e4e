"""Forced formats of an answer: JSON of a schema, from ``response_format``, or tool calls, from ``tool_choice``.

Both become one JSON schema for the engine, which excludes every token that cannot lead to a fitting text. So the tokens
follow another distribution than the model's own, and the answer is not trained on.

Schemas are checked before an engine gets them. A schema must be valid, must not use a keyword that an engine ignores
silently, and must compile quickly, since decoding waits for the compiler.
"""

import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from streamrl.producers.gateway.refusals import invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, NamedToolChoice, ToolDefinition
from streamrl.producers.gateway.tool_calls import FunctionCall, ParsedReply

MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_DEPTH = 32
"""Levels of schemas within schemas."""
MAX_REPEATS = 1000
"""Bound of the sum, over all patterns of a schema, of the product of the pattern's repeat counts. The time to compile a
pattern grows with the square of that product.
"""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")
_UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "multipleOf"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that the engine does not enforce everywhere."""
_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_COUNTS = re.compile(r"\{(?:\d*,)?(\d+)\}|\{(\d+),\}")


@dataclass(frozen=True)
class AnswerFormat:
    """A forced format. ``json_schema``: the schema as JSON text; ``param``: the request's field that asked for it.

    ``calls``: whether the answer consists of tool calls. With ``named`` it is the arguments of one call of
    ``function``, with ``required`` a list of objects with a ``name`` and ``parameters``.
    """

    param: str
    json_schema: str
    calls: Literal["none", "named", "required"] = "none"
    function: str = ""

    def reader(self) -> "ForcedCalls":
        """A new reader for the calls of one completion."""
        return ForcedCalls(self.function if self.calls == "named" else None)

    def parse(self, text: str) -> ParsedReply:
        """The text and the calls of a complete answer; if it was cut off, its last call is incomplete."""
        if self.calls == "none":
            return ParsedReply(text, ())
        calls: list[FunctionCall] = []
        for piece in self.reader().read(text):
            if piece.name is not None:
                calls.append(FunctionCall(piece.name, piece.arguments))
            else:
                calls[-1] = FunctionCall(calls[-1].name, calls[-1].arguments + piece.arguments)
        return ParsedReply("", tuple(calls))


def format_of(request: ChatCompletionRequest) -> AnswerFormat | None:
    """The format that a request forces on its answer; None if it forces none.

    Raises:
        ApiError: a schema is not valid, or cannot be enforced.
    """
    wanted, choice = request.response_format, request.tool_choice
    if isinstance(choice, NamedToolChoice):
        tool = next(tool for tool in request.offered_tools if tool.function.name == choice.function.name)
        return AnswerFormat("tools", _checked("tools", _parameters(tool)), "named", tool.function.name)
    if choice == "required":
        several = request.parallel_tool_calls is not False
        return AnswerFormat("tools", _checked("tools", _any_call(request.offered_tools, several=several)), "required")
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return AnswerFormat("response_format", '{"type": "object"}')
    return AnswerFormat("response_format", _checked("response_format", wanted.json_schema.definition))


def _parameters(tool: ToolDefinition) -> dict[str, Any]:
    parameters = tool.function.parameters or {"properties": {}}
    if parameters.get("type", "object") != "object":
        raise invalid("tools", f"expected parameters of type object in tool {tool.function.name}, got another type")
    return {"type": "object"} | parameters


def _any_call(tools: list[ToolDefinition], *, several: bool) -> dict[str, Any]:
    """The schema of a list of calls. Each tool's parameters are a definition, to which its own references point."""
    found = {f"tool{number}": _moved(_parameters(tool), f"#/$defs/tool{number}") for number, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            # The engine writes the properties in this order, so the reader gets the name before the arguments.
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{definition}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, definition in zip(tools, found, strict=True)
    ]
    bounds = {"minItems": 1} | ({} if several else {"maxItems": 1})
    return {"type": "array", "items": {"anyOf": calls}, **bounds, "$defs": found}


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A copy of a schema for another place in a larger one, with its references adjusted."""
    moved = copy.deepcopy(schema)
    for one in _subschemas("tools", moved):
        if isinstance(to := one.get("$ref"), str) and to.startswith("#"):
            one["$ref"] = place + to[1:]
    return moved


def _checked(param: str, schema: dict[str, Any]) -> str:
    """The schema as JSON text.

    Raises:
        ApiError: it is not a valid schema, or cannot be enforced.
    """
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise invalid(param, f"expected JSON schemas of {MAX_SCHEMA_CHARACTERS} characters at most, got {len(text)}")
    repeats = 0
    for one in _subschemas(param, schema):
        if unknown := sorted(_UNENFORCED.intersection(one)):
            raise invalid(
                param, f"expected a JSON schema without {unknown[0]}, got one with it: this server cannot enforce it"
            )
        if not str(one.get("$ref", "#")).startswith("#"):
            raise invalid(param, f"expected references within the JSON schema, got {one['$ref']!r:.80}")
        repeats += sum(_repeats(param, pattern) for pattern in _patterns(one))
    if repeats > MAX_REPEATS:
        raise invalid(
            param,
            f"expected patterns whose repeat counts multiply to at most {MAX_REPEATS}, got {min(repeats, 10**9)}",
        )
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path)) or "its top level"
        raise invalid(param, f"expected a JSON schema, got an error at {place:.80}: {error.message:.200}") from error
    return text


def _subschemas(param: str, schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The schema and all schemas within it. Values, such as those of ``enum``, are not schemas.

    Raises:
        ApiError: they are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise invalid(param, f"expected a JSON schema of at most {MAX_DEPTH} levels, got a deeper one")
    if isinstance(schema, list):
        for one in schema:
            yield from _subschemas(param, one, depth + 1)
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from _subschemas(param, [*value.values()], depth)
        elif keyword not in _VALUES:
            yield from _subschemas(param, value, depth + 1)


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield pattern
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        yield from by_pattern


def _repeats(param: str, pattern: str) -> int:
    if _LOOKS_AROUND.search(pattern):
        raise invalid(param, f"expected a pattern without look-ahead and look-behind, got {pattern!r:.80}")
    counts = [int((most or least)[:9]) for most, least in _COUNTS.findall(pattern)]
    return math.prod(counts) if counts else 0


class CallPiece(NamedTuple):
    """The next piece of a call. ``name``: only in a call's first piece; ``arguments``: the new JSON text."""

    number: int
    name: str | None
    arguments: str


class ForcedCalls:
    """Reads forced calls from text that arrives in pieces. ``function``: the text is the arguments of one call of it.

    Without ``function`` the text is a list of objects, each with its name first and then its parameters, as the schema
    says.
    """

    def __init__(self, function: str | None) -> None:
        self._function = function
        self._index = -1
        self._name = ""
        self._head: list[str] = []
        self._depth = 0
        self._in_text = self._escaped = self._in_arguments = False

    def read(self, text: str) -> list[CallPiece]:
        """Read more text; the pieces that it adds to the calls, at most one for each call."""
        if self._function is not None:
            if not text:
                return []
            name = self._function if self._index < 0 else None
            self._index = 0
            return [CallPiece(0, name, text)]
        pieces: list[CallPiece] = []
        name, arguments = None, list[str]()
        for character in text:
            index = self._index
            is_argument = self._advance(character)
            if self._index != index:
                if name is not None or arguments:
                    pieces.append(CallPiece(index, name, "".join(arguments)))
                name, arguments = self._name, []
            elif is_argument:
                arguments.append(character)
        if name is not None or arguments:
            pieces.append(CallPiece(self._index, name, "".join(arguments)))
        return pieces

    def _advance(self, character: str) -> bool:
        """Whether the character belongs to a call's arguments. The index goes up where a call's arguments start."""
        if self._in_text:
            self._in_text = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
            if self._depth == 2:
                self._head = []
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._in_arguments = False
        if self._in_arguments:
            # Blanks around the arguments do not belong to them.
            return self._depth > 2 or character not in " \t\r\n"
        if self._depth == 2:
            self._head.append(character)
            # The parameters start after the second colon; the name before them is complete.
            if character == ":" and not self._in_text and (name := _name_of("".join(self._head))) is not None:
                self._index, self._name, self._in_arguments = self._index + 1, name, True
        return False


def _name_of(head: str) -> str | None:
    try:
        name = json.loads(f"{head}null}}").get("name")
    except ValueError:
        return None
    return name if isinstance(name, str) else None
