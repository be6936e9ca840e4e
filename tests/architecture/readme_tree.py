"""The README's tree: one line per file, taken from each module's own first sentence.

``python -m tests.architecture.readme_tree`` writes it into the README; a test fails when the two differ.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import PACKAGES, ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- tree -->\n```", "```\n<!-- /tree -->"
WIDTH = 34


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.:;?])\s", paragraph)[0].rstrip(".:;")


def lines_of(folder: Path, depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield f"{indent}{folder.name + '/':<{WIDTH - len(indent)}} {first_sentence(folder / '__init__.py')}"
    for path in sorted(folder.iterdir(), key=lambda item: (item.is_dir(), item.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            yield from lines_of(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield f"{indent}  {path.name:<{WIDTH - len(indent) - 2}} {first_sentence(path)}"


def tree() -> str:
    return "\n".join(line.rstrip() for package in PACKAGES for line in lines_of(ROOT / package, 0))


def with_tree(readme: str) -> str:
    head, rest = readme.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{tree()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text()))
