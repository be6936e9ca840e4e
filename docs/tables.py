"""Markdown: tables, code and plain text. It knows nothing of their content."""

import re
from collections.abc import Iterator, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; bars inside cells are escaped."""
    yield _line(head)
    yield _line(["---"] * len(head))
    for row in rows:
        yield _line(row)


def code(text: str) -> str:
    """Text in the type of code; nothing for nothing."""
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """Text that holds no markup: an angle bracket before a letter would begin a tag."""
    return re.sub(r"<(?=[a-zA-Z/!])", "&lt;", text)


def prose(text: str) -> str:
    """A docstring's text as one paragraph."""
    return re.sub(r"``", "`", " ".join(text.split()))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
