"""Filter expressions: ``worker_id=worker-1 and (length>500 or not finish_reason=stop)``. Nothing else is evaluated.

    expression := conjunction ("or" conjunction)*
    conjunction := negation ("and" negation)*
    negation := "not" negation | "(" expression ")" | field operator value
    operator := = == != < <= > >= ~ !~        ~ searches a regular expression

A value is a word or a quoted text. It is compared by the field's type: numbers and weight versions by size, text as
text. A list contains (``=``) or does not contain (``!=``) the value. A missing field matches only ``!=``, ``!~``.

Why not the Common Expression Language: cel-python 0.5 has no bare words, so values would need quotes within the shell's
quotes. A missing field is an error in it, and a weight version has no order. It takes 0.4 s to import and 250 µs per
record; this takes 20 ms and 2 µs.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion

Lookup = Callable[[str], Any]
"""The value of a field of a record; ``ABSENT`` if it has none."""
Test = Callable[[Lookup], bool]
ABSENT = object()

# Longer operators come first: the first matching alternative is used, and "<=" starts with "<".
_TOKEN = re.compile(
    r"""\s*(?:(?P<op><=|>=|!=|!~|==|=|<|>|~|\(|\))|"(?P<dq>[^"]*)"|'(?P<sq>[^']*)'|(?P<word>[^\s()<>=!~"']+))"""
)
"""A word ends before a character that may follow it without a blank, so ``length>500`` is three tokens."""
_ORDERED = {"<", "<=", ">", ">="}
_OPERATORS = {"=", "==", "!=", "~", "!~", *_ORDERED}
_EXAMPLE = "such as 'worker_id=worker-1 and length>500'"
MAX_DEPTH = 50
"""Most levels of nesting, because the parser is recursive. No real filter needs more."""


@dataclass(frozen=True)
class Filter:
    """A parsed expression, and the names of the fields in it."""

    test: Test
    fields: tuple[str, ...]

    def accepts(self, lookup: Lookup) -> bool:
        """Whether a record matches.

        Raises:
            UserError: a number or version is compared with something else.
        """
        return self.test(lookup)


def parse_filter(text: str) -> Filter:
    """Parse an expression.

    Raises:
        UserError: the text is not a filter; the message names the place and what to write there.
    """
    parser = _Parser(text, list(_tokens(text)))
    test = parser.expression()
    if parser.tokens:
        raise parser.refusal("'and', 'or' or the end")
    return Filter(test, tuple(dict.fromkeys(parser.fields)))


@dataclass(frozen=True)
class _Token:
    text: str
    kind: str
    position: int

    def is_word(self, word: str) -> bool:
        return self.kind == "word" and self.text.lower() == word


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise UserError(f"expected a filter {_EXAMPLE}, got {text!r}: unclosed quote at character {position + 1}")
        yield _Token(match[match.lastgroup], match.lastgroup, match.start(match.lastgroup))
        position = match.end()


@dataclass
class _Parser:
    """A recursive descent parser, with a method for each rule of the grammar."""

    text: str
    tokens: list[_Token]
    fields: list[str] = field(default_factory=list)
    depth: int = 0

    def refusal(self, wanted: str) -> UserError:
        got = f"{self.tokens[0].text!r} at {self.tokens[0].position + 1}" if self.tokens else "the end"
        return UserError(f"expected {wanted} in the filter {self.text!r}, got {got}; write it {_EXAMPLE}")

    def expression(self) -> Test:
        return self._joined("or", self._conjunction, any)

    def _conjunction(self) -> Test:
        return self._joined("and", self._negation, all)

    def _joined(self, word: str, part: Callable[[], Test], fold: Callable[[Iterable[bool]], bool]) -> Test:
        tests = [part()]
        while self.tokens and self.tokens[0].is_word(word):
            self.tokens.pop(0)
            tests.append(part())
        # A generator, so that ``any`` and ``all`` stop at the first test that decides.
        return tests[0] if len(tests) == 1 else lambda lookup: fold(test(lookup) for test in tests)

    def _negation(self) -> Test:
        # Depth is counted here, because every nesting, by "not" or by a bracket, uses this rule.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UserError(f"expected a filter of at most {MAX_DEPTH} levels, got a deeper one")
        try:
            if self.tokens and self.tokens[0].is_word("not"):
                self.tokens.pop(0)
                inner = self._negation()
                return lambda lookup: not inner(lookup)
            if self._at("("):
                self.tokens.pop(0)
                inner = self.expression()
                if not self._at(")"):
                    raise self.refusal("')'")
                self.tokens.pop(0)
                return inner
            return self._comparison()
        finally:
            self.depth -= 1

    def _at(self, symbol: str) -> bool:
        return bool(self.tokens) and self.tokens[0].kind == "op" and self.tokens[0].text == symbol

    def _comparison(self) -> Test:
        name = self._word("a field")
        if not (self.tokens and self.tokens[0].kind == "op" and self.tokens[0].text in _OPERATORS):
            raise self.refusal(f"an operator ({' '.join(sorted(_OPERATORS))}) after {name!r}")
        operator = self.tokens.pop(0).text
        wanted = self._word(f"a value after {name!r}", quoted=True)
        self.fields.append(name)
        return _comparison(name, operator, wanted)

    def _word(self, wanted: str, *, quoted: bool = False) -> str:
        # A quoted text can only be a value. A field is a word, and an operator is neither.
        if not self.tokens or not (self.tokens[0].kind == "word" or (quoted and self.tokens[0].kind != "op")):
            raise self.refusal(wanted)
        return self.tokens.pop(0).text


def _comparison(name: str, operator: str, wanted: str) -> Test:
    if operator in ("~", "!~"):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise UserError(f"expected a regular expression after {name}{operator}, got {wanted!r}: {error}") from error
        # A missing field matches no pattern, so it passes ``!~`` as it passes ``!=``.
        return lambda lookup: (_found(pattern, lookup(name))) == (operator == "~")
    if operator in _ORDERED:
        return lambda lookup: _in_order(name, operator, lookup(name), wanted)
    return lambda lookup: _equals(lookup(name), wanted) == (operator != "!=")


def _found(pattern: re.Pattern[str], value: Any) -> bool:
    return value is not ABSENT and value is not None and pattern.search(str(value)) is not None


def _equals(value: Any, wanted: str) -> bool:
    if value is ABSENT:
        return False
    # Before numbers: a bool is an int, and would equal 1 rather than ``true``.
    if value is None or isinstance(value, bool):
        return str(value).lower() == wanted.lower()
    # Before lists: a version is a tuple, and its two numbers would be searched for the value.
    if isinstance(value, PolicyVersion):
        return str(value) == wanted or str(value.number) == wanted
    if isinstance(value, int | float):
        number = _number(wanted)
        return number is not None and value == number
    if isinstance(value, list | tuple | set | frozenset | dict):
        return any(_equals(each, wanted) for each in value)
    return str(value) == wanted


def _in_order(name: str, operator: str, value: Any, wanted: str) -> bool:
    # A missing value has no order: it passes neither ``<`` nor ``>=``.
    if value is ABSENT or value is None:
        return False
    # Before text: as text, version 1-9 would come after 1-10.
    if isinstance(value, PolicyVersion):
        left, right = _versions(name, value, wanted)
        return _ordered(operator, left, right)
    if isinstance(value, int | float):
        if (number := _number(wanted)) is None:
            raise UserError(f"expected a number to compare {name} with, got {wanted!r}")
        return _ordered(operator, value, number)
    return _ordered(operator, str(value), wanted)


def _versions(name: str, value: PolicyVersion, wanted: str) -> tuple[Any, Any]:
    if wanted.isdigit():
        return value.number, int(wanted)
    try:
        return value, PolicyVersion.parse(wanted)
    except ValueError as error:
        raise UserError(f"expected a version such as 1-20 or 20 to compare {name} with, got {wanted!r}") from error


def _ordered(operator: str, left: Any, right: Any) -> bool:
    if operator.startswith("<"):
        return bool(left < right or (operator == "<=" and left == right))
    return bool(left > right or (operator == ">=" and left == right))


def _number(text: str) -> float | None:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return None
