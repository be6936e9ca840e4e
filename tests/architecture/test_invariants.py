"""Invariants have names, in docstrings, and each has a test that bears its name."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.sources import PACKAGES, ROOT, parsed

FOLDERS = (*(package for package in PACKAGES if (ROOT / package).is_dir()), "streamrl", "docs", "benchmarks", "tests")
NAMED = re.compile(r"(?:Invariant:?|Invariants[^:]*:|[;,-]|\band) (?P<name>(?:[a-z0-9]+_)+[a-z0-9]+)\b(?=[:;.,( ]|$)")
"""In a docstring's text from the word on, in one line: behind the word itself, or as one of a list."""
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names_in(docstring: str) -> list[str]:
    begin = docstring.find("Invariant")
    return [] if begin < 0 else [found["name"] for found in NAMED.finditer(" ".join(docstring[begin:].split()))]


@cache
def trees() -> dict[str, ast.Module]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): parsed(path.read_text()) for path in paths}


def invariants() -> Iterator[tuple[str, str]]:
    for path, tree in trees().items():
        if not path.startswith("tests/"):
            nodes = (node for node in ast.walk(tree) if isinstance(node, HAVE_DOCSTRINGS))
            yield from ((path, name) for node in nodes for name in names_in(ast.get_docstring(node) or ""))


def names_of_tests() -> Iterator[str]:
    for path, tree in trees().items():
        if path.startswith("tests/"):
            functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (node.name for node in functions if node.name.startswith("test_"))


def test_every_invariant_has_a_test_of_its_name() -> None:
    named, written = list(invariants()), "\n".join(names_of_tests())
    assert len(named) > 250, "names are not found any more"
    assert not [f"{path}: {name}" for path, name in named if name not in written]


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("Pure. Invariant it_holds: whatever comes.", ["it_holds"]),
        ("Invariants: it_holds; it_stays, in the tables of\n``groups_per_step``.", ["it_holds", "it_stays"]),
        (
            "Invariants, each with a test\nof its name:\n- it_holds: of *a_b*;\n- it_stays: all.",
            ["it_holds", "it_stays"],
        ),
        ("Nothing of that_kind: it_holds.", []),
    ],
)
def test_names_are_found_as_they_are_written(docstring: str, names: list[str]) -> None:
    assert names_in(docstring) == names
