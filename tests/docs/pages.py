"""What stands in the pages of docs/: links, commands, settings."""

import re
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
READ_FIRST = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_PYTHON = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[str, str]]:
    """Path and anchor of every link of a page, code left out."""
    text = _FENCE.sub("", page.read_text())
    return [(path, anchor) for path, _, anchor in (link.partition("#") for link in _LINK.findall(text))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub make them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def commands(page: Path) -> list[list[str]]:
    """Every ``streamrl ...`` in code, as words; of those with a choice, as in ``topics apply|diff``, each one."""
    text = _PYTHON.sub("", page.read_text())
    code = _FENCE.findall(text) + re.findall(r"`(streamrl [^`]+)`", _FENCE.sub("", text))
    lines = [line.split("#")[0] for block in code for line in block.splitlines()]
    parts = [part for line in lines for part in re.split(r";|&&|\s\|\s", line)]
    found = [part.split("streamrl ", 1)[1].split() for part in parts if re.search(r"(^|[/\s])streamrl [\w-]", part)]
    return [list(words) for each in found for words in product(*(_choices(word) for word in each))]


def _choices(word: str) -> list[str]:
    return word.split("|") if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word) else [word]


def settings(text: str) -> set[str]:
    """Every ``section.key`` in code, also as ``--section.key`` and in tables of TOML; names of files left out."""
    inline = re.findall(r"`(?:--)?([a-z]+\.[a-z_0-9]+(?:\.[a-z_0-9]+)?)(?:[ =][^`]*)?`", _FENCE.sub("", text))
    options = re.findall(r"--([a-z]+\.[a-z_0-9]+)", text)
    for block in re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        section = ""
        for line in block.splitlines():
            if header := re.match(r"\[(\w+)\]", line):
                section = header[1]
            elif key := re.match(r"(\w+) *=", line):
                inline.append(f"{section}.{key[1]}")
    return {
        key for key in (*inline, *options) if not key.endswith((".md", ".py", ".toml", ".json", ".jsonl", ".parquet"))
    }
