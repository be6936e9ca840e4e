"""A commented configuration: chosen settings as TOML, each with what it means, in the words of its own type."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tomli_w

from deploy.settings.explaining import described

WIDTH = 112


@dataclass(frozen=True)
class Entry:
    """One setting; ``comment`` None: its description; not ``active``: shown, but left at its default."""

    key: str
    value: Any
    comment: str | None = None
    active: bool = True


def as_commented_toml(head: Sequence[str], entries: Sequence[Entry]) -> str:
    """The entries by section, in their order; long comments stand above their line."""
    lines = [f"# {line}" for line in head]
    sections: dict[str, list[Entry]] = {}
    for entry in entries:
        sections.setdefault(entry.key.split(".")[0], []).append(entry)
    for section, members in sections.items():
        lines += ["", f"[{section}]"]
        for entry in members:
            lines += _lines(entry)
    return "\n".join(lines) + "\n"


def _lines(entry: Entry) -> list[str]:
    name = entry.key.split(".", 1)[1]
    setting = ("" if entry.active else "# ") + tomli_w.dumps({name: entry.value}, indent=0).replace(",\n", ", ")
    setting = setting.replace("[\n", "[").replace(", ]", "]").strip()
    comment = described(tuple(entry.key.split("."))) if entry.comment is None else entry.comment
    together = f"{setting:<40} # {comment}"
    if len(together) <= WIDTH:
        return [together]
    return [*(f"# {line}" for line in _wrapped(comment)), setting]


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > WIDTH - 4:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines
