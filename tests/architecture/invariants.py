"""The invariants that docstrings name, what they say, and the tests that carry their names."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tests.architecture.sources import PACKAGES, ROOT, parsed

FOLDERS = (*(package for package in PACKAGES if (ROOT / package).is_dir()), "streamrl", "docs", "benchmarks", "tests")
NAMED = re.compile(r"(?:Invariant:?|Invariants[^:]*:|[;,-]|\band) (?P<name>(?:[a-z0-9]+_)+[a-z0-9]+)\b(?=[:;.,( ]|$)")
"""In a docstring's text from the word on, in one line: behind the word itself, or as one of a list."""
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BREAK = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Invariant:
    """One name in one file. ``meaning``: the docstring's words on it, empty where the name says all."""

    path: str
    name: str
    meaning: str


def named_in(docstring: str) -> list[tuple[str, str]]:
    """Names and meanings of the invariants of a docstring; other text may stand before and behind them."""
    begin = docstring.find("Invariant")
    if begin < 0:
        return []
    parts = _BREAK.split(docstring[begin:])
    # A meaning ends with its paragraph, a list may go on behind a blank line.
    text = "\0".join(" ".join(part.split()) for part in parts)
    found = list(NAMED.finditer(text.replace("\0", " ")))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [(match["name"], _meaning(text[match.end() : end])) for match, end in zip(found, ends, strict=False)]


def _meaning(text: str) -> str:
    return text.partition("\0")[0].strip().lstrip(":;,.- ").rstrip(";,- ")


@cache
def trees() -> Mapping[str, ast.Module]:
    """Every module of the repository, by its path."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): parsed(path.read_text()) for path in paths}


@cache
def invariants() -> tuple[Invariant, ...]:
    """All of them, in the order of files."""
    return tuple(
        Invariant(path, name, meaning)
        for path, tree in trees().items()
        if not path.startswith("tests/")
        for node in ast.walk(tree)
        if isinstance(node, HAVE_DOCSTRINGS)
        for name, meaning in named_in(ast.get_docstring(node) or "")
    )


@cache
def named_tests() -> tuple[tuple[str, str], ...]:
    """Path and name of every test function."""
    return tuple(_test_functions())


def _test_functions() -> Iterator[tuple[str, str]]:
    for path, tree in trees().items():
        if path.startswith("tests/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    yield path, node.name
