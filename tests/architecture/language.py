"""How plainly the tree is written, in figures: ``python -m tests.architecture.language [--root ROOT] [PATH ...]``.

Reads the product's docstrings, comments and messages, and the pages of ``docs/`` that people write. Without paths it
prints the figures; with paths (files or folders) it lists the places to look at in those: a list of places, not of
mistakes.
"""

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.sources import FOR_TOOLS, ROOT, files_of, parsed

LONG = 25
"""Words in a sentence from which on a reader may need to read it twice."""
MESSAGE_WORDS = 4
"""Words in a string from which on it is read as a sentence and not as a name."""
DIALECT = re.compile(
    r"\b(anew|whoever|whatever|whichever|nobody|somebody|of late|le(?:t|ts|tting) go of|of (?:whom|which|what)|"
    r"who (?:has|reads|asks|waits|is|takes|gives)|no more\b(?= than| and|[.,:;]|$)|goes away|went away|"
    r"st(?:ands?|ood) still|heard of|(?:is|are|was|were|be|been) told|tells? of|begins?|began|begun|beside|"
    r"such a one|one's own|bring(?:s|ing)? along|fallen behind|falls? behind|(?:is|are) asked (?:of|for)|"
    r"l(?:ies|ie|ay) (?:in|at|beside|there|ready)|stands? (?:in|for|at|there|beside)|"
    r"what (?:is|was|goes|comes|stands|lies|it|they|nobody)|as it (?:is|was|stands)|in vain|in place of|meanwhile|"
    r"thereby|therein|whereof|once more|by itself)\b",
    re.IGNORECASE,
)
GENERATED = "<!-- Written by `python -m docs.generate`"
"""In each page of ``docs/`` that a program writes."""
NOT_PROSE = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Passage:
    """Connected text of one place.

    ``kind``: docstring, comment, message or page; ``line``: of its first line, from 1.
    """

    path: str
    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Language:
    """Figures of one tree. Sentences are those of pages and docstrings, their lengths in words."""

    docs_bytes_by_hand: int
    sentence_words_mean: float
    sentence_words_95: float
    dialect_words: int
    docstrings_beginning_with_of: int


_WRITTEN = re.compile(r"<!-- fields of .*?<!-- fields: end -->", re.DOTALL)
"""The tables that a program writes into a page by hand."""


def language_of(root: Path) -> Language:
    """Measure a tree."""
    passages = list(passages_of(root))
    lengths = sorted(
        words(each) for one in passages if one.kind in ("docstring", "page") for each in sentences(one.text)
    )
    lengths = [length for length in lengths if length]
    return Language(
        docs_bytes_by_hand=sum(len(_WRITTEN.sub("", path.read_text()).encode()) for path in pages_by_hand(root)),
        sentence_words_mean=statistics.mean(lengths),
        sentence_words_95=lengths[len(lengths) * 95 // 100],
        dialect_words=sum(len(DIALECT.findall(one.text)) for one in passages),
        docstrings_beginning_with_of=sum(one.kind == "docstring" and one.text.startswith("Of ") for one in passages),
    )


def pages_by_hand(root: Path) -> list[Path]:
    """The pages of the manual that no program writes."""
    return [path for path in sorted((root / "docs").rglob("*.md")) if GENERATED not in path.read_text()]


def passages_of(root: Path) -> Iterator[Passage]:
    """Docstrings, comments and messages of the product, then the pages."""
    for path, _, text in files_of(root):
        yield from _of_module(str(path), text)
    for path in (root / "README.md", root / "CONTRIBUTING.md", *pages_by_hand(root)):
        yield from _of_page(str(path.relative_to(root)), path.read_text())


def _of_module(path: str, text: str) -> Iterator[Passage]:
    docstrings = set[int]()
    for node in ast.walk(parsed(text)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                docstrings.add(id(each.value))
                yield Passage(path, each.lineno, "docstring", each.value.value.strip())
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and words(node.value) >= MESSAGE_WORDS
        ):
            yield Passage(path, node.lineno, "message", node.value.strip())
    yield from _comments(path, text)


def _comments(path: str, text: str) -> Iterator[Passage]:
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or FOR_TOOLS.match(token.string):
            continue
        line = token.start[0]
        if line != last + 1 and lines:
            yield Passage(path, first, "comment", " ".join(lines))
            lines = []
        if not lines:
            first = line
        last = line
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield Passage(path, first, "comment", " ".join(lines))


def _of_page(path: str, text: str) -> Iterator[Passage]:
    prose = NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=\s*[-*|#]|\s*\d+\. ))", prose):
        if part.strip() and not part.strip().startswith(("|", "#", "<")):
            yield Passage(path, line, "page", " ".join(part.split()))
        line += part.count("\n")


def sentences(text: str) -> list[str]:
    """Parts of a text that end in a full stop, a question mark, a colon or a semicolon, or with its paragraph."""
    return [each for part in re.split(r"\n\s*\n|\n(?=\s*[-*] )", text) for each in re.split(r"(?<=[.!?:;])\s+", part)]


def words(sentence: str) -> int:
    """Words of a sentence; code, links' targets and numbers are not counted."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"``?[^`]*``?|\]\([^)]*\)", " ", sentence)))


def places(root: Path, paths: list[str]) -> Iterator[str]:
    """Where long sentences and odd phrases stand, as lines to print."""
    for one in passages_of(root):
        if not any(one.path == path or one.path.startswith(path.rstrip("/") + "/") for path in paths):
            continue
        if one.kind == "docstring" and one.text.startswith("Of "):
            yield f"{one.path}:{one.line}: begins with Of: {one.text[:90]!r}"
        for sentence in sentences(one.text):
            if one.kind != "message" and (count := words(sentence)) > LONG:
                yield f"{one.path}:{one.line}: {count} words: {' '.join(sentence.split())[:110]!r}"
            for found in DIALECT.finditer(sentence):
                yield f"{one.path}:{one.line}: {found[0]!r} in {one.kind}: {' '.join(sentence.split())[:110]!r}"


def main() -> None:
    """Print the figures, or the places in the paths that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree to read")
    parser.add_argument("paths", nargs="*", help="files or folders whose places to list, as schemas/codec.py")
    given = parser.parse_args()
    if given.paths:
        print("\n".join(places(given.root, given.paths)))
        return
    for name, value in vars(language_of(given.root)).items():
        print(
            f"{name.replace('_', ' '):32} {value:,.1f}"
            if isinstance(value, float)
            else f"{name.replace('_', ' '):32} {value:,}"
        )


if __name__ == "__main__":
    main()
