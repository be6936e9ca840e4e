"""Published figures come from ``benchmarks/results``: each stands in front of a comment that says which one it is.

In Markdown, where the comments do not show:

    5.6<!--= transport.json.rows[path=redis,tokens=200].ratio as .1f --> times

is the field ``ratio`` of the one row that the brackets choose, in Python's format ``.1f``. ``[3]`` is an item of a
list; ``min``, ``max`` or ``mean`` in front takes what several rows say together; `` * 1000`` or `` / OTHER FIELD``
may follow. A number that is a condition and no result stands before ``<!--= given -->``. And

    <!--= rows transport.json.rows
    | {tokens:,} | {name} | {range[0]:,.0f} |
    -->
    (a table's head)
    <!--= end -->

writes a line for each row below the head; nothing stands in place of None.

Invariants: a_figure_that_differs_from_its_source_is_refused; a_figure_without_a_source_is_refused, in the tables of
the sections that ``GUARDED`` names. Other numbers in prose are not told from conditions and are not looked at.
"""

import json
import operator
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("benchmarks/*.md", "benchmarks/*/README.md", "docs/*.md", "README.md")
"""Pages with figures. ``CHANGELOG.md`` is none: it says what once was."""
GUARDED = {
    "benchmarks/headline.md": "Measured",
    "benchmarks/reliability.md": "What it costs",
    "benchmarks/observation/README.md": "What it costs",
}
"""Sections in whose tables every number has a source, or is a condition that was given."""

Together = Callable[[Sequence[float]], float]
_TOGETHER: Mapping[str, Together] = {"min": min, "max": max, "mean": fmean}
_OPERATIONS = {"*": operator.mul, "/": operator.truediv}
_NUMBER = r"[-+−]?\d[\d,]*(?:\.\d+)?%?"
_INLINE = re.compile(rf"(?P<shown>{_NUMBER})?<!--= (?!rows |end |given )(?P<source>[^>]+?) -->")
_ROWS = re.compile(r"(<!--= rows (?P<source>[^\n]+)\n(?P<template>.*?)\n-->\n)(?P<body>.*?)(<!--= end -->)", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[\w-]+)|\[(?P<index>\d+)\]|\[(?P<where>[^\]]+)\]")
_WORD = re.compile(r"(?:\[[^\]]*\]|[^\s\[])+")
"""Of an expression; values in brackets may have blanks."""
_SOURCED = re.compile(rf"{_NUMBER}<!--= .*?-->")


class FigureError(Exception):
    """A source that names nothing, or several figures where one is wanted."""


@dataclass
class Figures:
    """The figures of a folder of results."""

    folder: Path = RESULTS
    differences: list[str] = field(default_factory=list)

    def renewed(self, text: str) -> str:
        """The page with every figure as its source has it; what differed is added to ``differences``.

        Raises:
            FigureError: a source that there is not.
        """
        return _INLINE.sub(self._figure, _ROWS.sub(self._rows, text))

    def value(self, expression: str) -> Any:
        """What a source says: ``[min|max|mean] PATH [* NUMBER|/ NUMBER|* PATH|/ PATH]…``.

        Raises:
            FigureError: it names nothing, or more than one figure.
        """
        words = _WORD.findall(expression)
        together = _TOGETHER.get(words[0])
        found = self._one(words.pop(0), None) if together is None else self._one(words[1], together)
        rest = words if together is None else words[2:]
        for sign, other in zip(rest[::2], rest[1::2], strict=True):
            found = _OPERATIONS[sign](found, float(other) if other[0].isdigit() else self._one(other, None))
        return found

    def _one(self, path: str, together: Together | None) -> Any:
        found = self.chosen(path)
        if together is not None:
            return together(found)
        if isinstance(found, _Many):
            if len(found) != 1:
                raise FigureError(f"expected one figure, got {len(found)} from {path}; choose by [name=value,…]")
            return found[0]
        return found

    def chosen(self, path: str) -> Any:
        """What a path leads to; a ``[name=value]`` leaves several.

        Raises:
            FigureError: it leads nowhere.
        """
        name, _, steps = path.partition(".json")
        found = _results(self.folder / f"{name}.json")
        if "".join(step[0] for step in _STEP.finditer(steps)) != steps:
            raise FigureError(f"expected .name, [number] or [name=value,…] after {name}.json, got {steps}")
        try:
            return reduce(_followed, _STEP.finditer(steps), found)
        except (KeyError, IndexError, TypeError) as error:
            raise FigureError(f"expected a figure at {path}, got {type(error).__name__}: {error}") from error

    def _figure(self, match: re.Match[str]) -> str:
        expression, _, shape = match["source"].rpartition(" as ")
        right = format(self.value(expression or shape), shape if expression else "")
        if match["shown"] != right:
            self.differences.append(f"{match['source']} is {right}, the page says {match['shown'] or 'nothing'}")
        return f"{right}<!--= {match['source']} -->"

    def _rows(self, match: re.Match[str]) -> str:
        rows = self.chosen(match["source"])
        lines = [_LENIENT.vformat(match["template"], (), row) for row in (rows if isinstance(rows, list) else [rows])]
        kept = match["body"].splitlines()
        # A table's head is the author's; of what follows it, and of a list, nothing is kept.
        head = next((number + 1 for number, line in enumerate(kept) if re.match(r"\|[ :-]+\|", line)), 0)
        body = "\n".join(["", *kept[:head], *lines, "", ""]) if not head else "\n".join([*kept[:head], *lines, "", ""])
        if body != match["body"]:
            self.differences.append(f"the rows of {match['source']} differ")
        return f"{match[1]}{body}{match[5]}"


class _Many(list[Any]):
    """What several rows have, as against one row's list."""


def _followed(found: Any, step: re.Match[str]) -> Any:
    if step["where"]:
        # A comma within a value stands before no name and sign.
        wanted = [part.partition("=") for part in re.split(r",(?=\w+=)", step["where"])]
        return _Many(row for row in found if all(_as_word(row.get(name)) == value for name, _, value in wanted))
    key: Any = step["key"] if step["key"] else int(step["index"])
    return _Many(row[key] for row in found) if isinstance(found, _Many) else found[key]


def _as_word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@cache
def _results(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FigureError(
            f"expected results in {path.name}, got {type(error).__name__}; run its make bench-…"
        ) from error


class _Lenient(string.Formatter):
    """Writes nothing for None, whatever its format, and words for what is true or not."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "" if value is None else str(super().format_field(value, format_spec))


_LENIENT = _Lenient()


def unsourced(text: str, heading: str) -> Iterator[str]:
    """Cells of a section's tables with a number that has no source.

    Raises:
        FigureError: no such section, or no figure in it that has one.
    """
    section = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise FigureError(f"expected a section {heading!r}, got none")
    tables = [line for line in section[2].splitlines() if line.startswith("|")]
    if not any("<!--= " in line for line in tables):
        raise FigureError(f"expected figures with sources in the tables of {heading!r}, got none")
    for line in tables:
        for cell in line.strip("|").split("|"):
            # Not figures: addresses of links, names in code, and numbers inside a word (a1, p99, v2).
            bare = re.sub(r"\]\([^)]*\)|`[^`]*`|\b[A-Za-z]\w*", "", _SOURCED.sub("", cell))
            if re.search(r"\d", bare):
                yield cell.strip()


def published() -> Iterator[tuple[str, str]]:
    """Every page that may have figures: its name and its text."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), path.read_text()


def complaints() -> Iterator[str]:
    """What a reader could not trust, a line each."""
    for name, text in published():
        figures = Figures()
        try:
            figures.renewed(text)
            yield from (f"{name}: {line}" for line in figures.differences)
            if name in GUARDED:
                yield from (f"{name}: a number without a source in: {cell}" for cell in unsourced(text, GUARDED[name]))
        except FigureError as error:
            yield f"{name}: {error}"
