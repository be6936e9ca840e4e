"""The settings reference: every key with its type, its default and what it means, from the types alone."""

import inspect
from collections.abc import Iterator
from itertools import groupby

from pydantic import BaseModel

from deploy.manual.tables import code, plain, table
from deploy.settings.explaining import explain
from deploy.settings.tree import Settings
from deploy.settings.wording import known_keys

HEAD = """# Settings

<!-- Written by `python -m deploy.manual` from the types; do not edit. -->

One tree: a TOML file, then the environment, then the command line; later ones win. `loop.max_staleness` is
`max_staleness` under `[loop]` in the file, `STREAMRL_LOOP__MAX_STALENESS` in the environment and `--loop.max_staleness`
on the command line. The word `none` unsets what may be unset. `streamrl config show CONFIG` prints the resolved tree,
`streamrl config explain KEY` one setting, `streamrl config schema` the JSON schema. A name that does not exist is
refused and the nearest one is told; so is a setting that others make meaningless.
"""


def settings_page() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for section, keys in groupby(known_keys(), key=lambda key: key.rpartition(".")[0]):
        lines += [f"## [{section}]", "", *_about(section), *table(HEADINGS, [_row(key) for key in keys]), ""]
    return "\n".join(lines).rstrip() + "\n"


HEADINGS = ("setting", "meaning", "type", "default")


def _row(key: str) -> tuple[str, str, str, str]:
    _, meaning, shape, *_ = explain(key)
    kinds, _, default = shape.strip().partition("; ")
    return (
        code(key.rpartition(".")[2]),
        plain(meaning.strip()),
        _without_markup(kinds),
        code(default.removeprefix("default ")),
    )


def _without_markup(kinds: str) -> str:
    """A pattern stands as code."""
    kind, matching, rest = kinds.partition("matching ")
    pattern, _, other = rest.partition(" or ")
    return f"{kind}{matching}{code(pattern)}{' or ' if other else ''}{other}" if matching else kinds


def _about(section: str) -> Iterator[str]:
    """What the section's own docstring says beyond its name."""
    model: type[BaseModel] = Settings
    for part in section.split("."):
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type), "a section holds sections"
        assert issubclass(annotation, BaseModel), "a section holds sections"
        model = annotation
    text = " ".join((inspect.getdoc(model) or "").replace("``", "`").split())
    text = text.removeprefix(f"`[{section}]`").lstrip(":. ")
    if text:
        yield from (text[:1].upper() + text[1:], "")
