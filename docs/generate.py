"""``python -m docs.generate`` writes the generated pages, tables of fields in pages that are written by hand, and
published figures as the benchmarks' results have them.

Run it after a setting, topic or command changed, or results were renewed. ``--check`` writes nothing, and refuses what
would be written and figures without a source.
"""

import inspect
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from typer.cli import get_docs_for_click

from benchmarks.gpu.memory import (
    SHAPES,
    KnownModel,
    cache_tokens,
    largest_micro_batch,
    smallest_tensor_parallel_size,
    trainer_bytes,
)
from docs.catalogues import faults_page, figures_page, invariants_page
from docs.figures import ROOT, FigureError, Figures, complaints, published
from docs.tables import code, plain, prose, table
from streamrl.cli.app import app
from streamrl.schemas.control import Control
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import CATALOGUE, DAY_MS, HOUR_MS, INSTANCE_TOPICS, Topic
from streamrl.settings.explaining import explain
from streamrl.settings.first import FIRST, first_keys
from streamrl.settings.keys import known_keys
from streamrl.settings.tree import Settings

# The settings reference: every key with its type, its default and what it means, from the types alone.

SETTINGS_HEAD = """# Settings

<!-- Written by `python -m docs.generate` from the types; do not edit. -->

Settings come from a TOML file, then the environment, then the command line; later ones win. `loop.max_staleness` is
`max_staleness` under `[loop]` in the file, `STREAMRL_LOOP__MAX_STALENESS` in the environment and `--loop.max_staleness`
on the command line. The word `none` unsets an optional setting. `streamrl config show CONFIG` prints all values,
`streamrl config explain KEY` explains one setting, `streamrl config explain --schema` prints the JSON schema. An
unknown name is refused, and the message names the nearest one. A setting that another setting makes meaningless is
refused, too.

Users mostly change the first {first} settings, grouped here by purpose. The [others](#advanced) follow by section.
"""
ADVANCED_HEAD = """## Advanced

Most runs keep these defaults.
"""


def settings_page() -> str:
    """The page as Markdown."""
    first = set(first_keys())
    lines = [SETTINGS_HEAD.format(first=len(first))]
    for want, wanted in FIRST.items():
        lines += [f"## {want}", "", *table(HEADINGS, [_setting_row(key, key) for key in wanted]), ""]
    lines.append(ADVANCED_HEAD)
    others = (key for key in known_keys() if key not in first)
    for section, keys in groupby(others, key=lambda key: key.rpartition(".")[0]):
        rows = [_setting_row(key, key.rpartition(".")[2]) for key in keys]
        lines += [f"### [{section}]", "", *_about(section), *table(HEADINGS, rows), ""]
    return "\n".join(lines).rstrip() + "\n"


HEADINGS = ("setting", "meaning", "type", "default")
_FIELDS = re.compile(r"(<!-- fields of (?P<table>[\w.]+): begin.*? -->\n).*?(<!-- fields: end -->)", re.DOTALL)
"""Where a page lists the fields of a table, such as ``emulation.decode``."""
LONGEST_DEFAULT = 80
"""Characters of a field's default that are shown."""


def emulation_page() -> str:
    """The page as it is, with the fields of its tables renewed."""
    return _FIELDS.sub(_fields_of, (DOCS / "emulation.md").read_text())


def _fields_of(match: re.Match[str]) -> str:
    under = match["table"] + "."
    rows = [_setting_row(key, key.rpartition(".")[2]) for key in known_keys(in_tables=True) if key.startswith(under)]
    shortened = [(*row[:-1], row[-1] if len(row[-1]) <= LONGEST_DEFAULT else "see meaning") for row in rows]
    lines = ["", *table(("field", *HEADINGS[1:]), shortened), "", ""]
    return match[1] + "\n".join(lines) + match[3]


def _setting_row(key: str, name: str) -> tuple[str, str, str, str]:
    """A setting's row; ``name`` is its key or the last part of that."""
    _, meaning, shape, *_ = explain(key)
    kinds, _, default = shape.strip().partition("; ")
    return (
        code(name),
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


# The topics reference: what travels where and how long it is kept, from the catalogue and the messages' types.

TOPICS_HEAD = """# Topics

<!-- Written by `python -m docs.generate` from the catalogue; do not edit. -->

A topic's full name is the run's name, a dot, and the name below. `streamrl topics apply --run NAME` makes a broker
match this page, `streamrl topics diff --run NAME` lists the differences. Keys and headers are readable text, so `kcat`
and Kafka UI show them; `streamrl tail TOPIC` decodes the values. [Wire format](architecture.md#wire-format) explains
the bytes: arrays and long texts follow the map, and the map has their numbers of items and bytes.
"""


def topics_page() -> str:
    """The page as Markdown."""
    lines = [TOPICS_HEAD, "## Who writes and reads", ""]
    lines += [*table(("topic", "message", "key", "writers", "readers"), [_users_row(topic) for topic in CATALOGUE]), ""]
    lines += ["## How much is kept", ""]
    lines += [*table(("topic", "partitions", "kept", "largest record"), [_size_of(topic) for topic in CATALOGUE]), ""]
    own = ", ".join(code(topic.name) for topic in INSTANCE_TOPICS)
    lines += [f"An [attached instance](instances.md) has {own} of its own, as `RUN.policy.NAME.steps` and so on.", ""]
    for topic in CATALOGUE:
        for message in _messages(topic):
            lines += _message(topic, message)
    lines += ["## Parts of messages", ""]
    messages = [message for topic in CATALOGUE for message in _messages(topic)]
    for part in sorted(_parts(messages), key=lambda part: part.__name__):
        lines += _part(part)
    return "\n".join(lines).rstrip() + "\n"


def _users_row(topic: Topic) -> tuple[str, ...]:
    messages = ", ".join(code(message.__name__) for message in _messages(topic))
    return (
        code(topic.name),
        messages or "another topic's bytes, the reason in the headers",
        topic.key,
        ", ".join(topic.writers),
        ", ".join(topic.readers),
    )


def _size_of(topic: Topic) -> tuple[str, ...]:
    partitions = str(topic.partitions) if topic.partitions else "2 × length buckets"
    return code(topic.name), partitions, _kept(topic), f"{topic.max_message_bytes / (1 << 20):.1f} MiB"


def _messages(topic: Topic) -> tuple[type[Message], ...]:
    """Every kind of message on a topic: of control messages, which share a schema, all that there are."""
    if topic.message is None:
        return ()
    kinds = tuple(Control.__subclasses__()) if issubclass(topic.message, Control) else (topic.message,)
    return kinds + topic.also


def _kept(topic: Topic) -> str:
    if topic.cleanup_policy == "compact":
        return "the last of each key"
    limit = "until finished, at most " if topic.cleanup_policy == "compact,delete" else ""
    unit, name = (DAY_MS, "day") if topic.retention_ms >= DAY_MS else (HOUR_MS, "hour")
    count = topic.retention_ms // unit
    return f"{limit}{count} {name}{'' if count == 1 else 's'}"


def _message(topic: Topic, message: type[Message]) -> Iterator[str]:
    summary, _, more = (message.__doc__ or "").partition("\n\n")
    yield f"## {message.__name__}"
    yield ""
    schema = f"schema {code(message.SCHEMA)}, version {message.VERSION}"
    yield f"On {code(topic.name)}, {schema}. {prose(summary)}"
    yield ""
    if more.strip():
        yield prose(more)
        yield ""
    yield from table(("field", "type", ""), list(_fields(message)))
    yield ""


def _parts(kinds: Sequence[Any]) -> set[type]:
    """All classes that fields of these are of, and their fields in turn."""
    found: set[type] = set()
    open_kinds = list(kinds)
    while open_kinds:
        kind = open_kinds.pop()
        if args := typing.get_args(kind):
            open_kinds += args
        elif isinstance(kind, type) and kind not in found and kind.__module__.startswith("streamrl."):
            found.add(kind)
            fields = kind.model_fields.values() if issubclass(kind, BaseModel) else ()
            open_kinds += [field.annotation for field in fields]
    return found - set(kinds)


def _part(part: type) -> Iterator[str]:
    summary, _, more = (part.__doc__ or "").partition("\n\n")
    yield from (f"### {part.__name__}", "", f"{prose(summary)} {prose(more)}".strip(), "")
    if issubclass(part, Enum):
        yield f"A text: {' or '.join(code(str(member.value)) for member in part)}."
    elif issubclass(part, BaseModel):
        yield from table(("field", "type", ""), list(_fields(part)))
    else:
        names = typing.get_type_hints(part)
        yield "A list: " + ", ".join(f"{code(name)} ({_kind(kind)})" for name, kind in names.items()) + "."
    yield ""


def _fields(message: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    arrays = message.array_fields() if issubclass(message, Message) else {}
    texts = message.text_fields() if issubclass(message, Message) else ()
    for name, field in message.model_fields.items():
        kind = f"array of {arrays[name]}" if name in arrays else _kind(field.annotation)
        yield code(name), f"long {kind}" if name in texts else kind, "" if field.is_required() else "may be left out"


def _kind(annotation: Any) -> str:
    """A type in words: ``tuple[str, ...]``, ``text or none``, ``PolicyVersion``."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(parts[0])
    if annotation is type(None):
        return "none"
    if origin is typing.Literal:
        return " or ".join(code(str(part)) for part in parts)
    if origin is tuple:
        return f"list of {_kind(parts[0])}"
    if origin is dict:
        return f"{_kind(parts[0])} → {_kind(parts[1])}"
    if parts:
        return " or ".join(_kind(part) for part in parts)
    name: str = annotation.__name__
    return {"str": "text", "int": "integer", "float": "number", "bool": "yes or no"}.get(name, name)


# The command line: every command with its arguments and options, as `typer utils docs` writes it.

COMMANDS_HEAD = """# Commands

<!-- Written by `python -m docs.generate` from the commands; do not edit. -->

Settings are given as `--section.key value` after a command's own options, see [Settings](settings.md). A user's mistake
ends in one line and exit code 2. `STREAMRL_DEBUG=1` shows the traceback of any error.
"""
_CUT_SHORT = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n")
"""Typer lists commands with half of their first sentences; the whole ones follow under their own headings."""


def commands_page() -> str:
    """The page as Markdown."""
    root = typer.main.get_command(app)
    written = get_docs_for_click(obj=root, ctx=typer.Context(root), name="streamrl")
    return COMMANDS_HEAD + "\n" + _CUT_SHORT.sub("", written[written.index("## `streamrl ") :]).rstrip() + "\n"


DOCS = Path("docs")
# What fits on which device, by the formulas of ``planning.memory``.

SIZES_HEAD = """# Sizes

<!-- Written by `python -m docs.generate` from `benchmarks/gpu/memory.py`; do not edit. -->

Which models fit on how many devices, **computed and not measured**, by the formulas in `benchmarks/gpu/memory.py`. 8 %
of each device stay free.

- The trainer columns give the memory on one device and the largest `batching.token_budget`. The trainer computes in
  bfloat16 with float32 weights and moments and `training.gradient_checkpointing`. `training.optimizer_offload` puts
  16 bytes a parameter into the processor's memory instead of 8 on the device.
- The worker column gives `generation.tensor_parallel_size` and the tokens of context that the worker holds. A worker is
  vLLM in bfloat16. Its devices are the fewest whose cache holds 262,144 tokens, such as 64 contexts of 4,096.

Speed depends on lengths and batch: `streamrl profile` measures it, and `streamrl plan` predicts a run from that.
"""
DEVICE_SIZES = {"24 GB": 24e9, "80 GB (H100)": 80e9, "141 GB (H200)": 141e9}
LORA_RANK, TOKENS = 16, 16_384


def sizes_page() -> str:
    """The page as Markdown."""
    lines = [SIZES_HEAD]
    for device, memory in DEVICE_SIZES.items():
        lines += [f"## Devices of {device}", "", *table(SIZES, [_size_row(shape, memory) for shape in SHAPES]), ""]
    return "\n".join(lines).rstrip() + "\n"


SIZES = (
    "model",
    "trainer, all weights",
    "with `training.optimizer_offload`",
    f"with `training.lora.rank = {LORA_RANK}`",
    "worker",
)


def _size_row(shape: KnownModel, memory: float) -> tuple[str, ...]:
    cells: list[str] = [shape.name]
    for rank, offload in ((0, False), (0, True), (LORA_RANK, False)):
        tokens = largest_micro_batch(shape, memory, lora_rank=rank, optimizer_offload=offload, most=TOKENS)
        taken = trainer_bytes(shape, tokens or 1024, lora_rank=rank, optimizer_offload=offload)
        cells.append(f"{taken / 1e9:.0f} GB, {f'{tokens:,} tokens' if tokens else 'does not fit'}")
    devices = smallest_tensor_parallel_size(shape, memory)
    held = f"{cache_tokens(shape, memory, devices):,} tokens" if devices else ""
    return (*cells, f"{devices} device{'s' * (devices > 1)}, {held}" if devices else "more than eight devices")


PAGES = {
    "settings.md": settings_page,
    "emulation.md": emulation_page,
    "topics.md": topics_page,
    "cli.md": commands_page,
    "sizes.md": sizes_page,
    "run-figures.md": figures_page,
    "faults.md": faults_page,
    "invariants.md": invariants_page,
}


def main(arguments: Sequence[str]) -> int:
    """Write what differs, and say so; with ``--check``, 1 if anything does."""
    stale = {name: text for name, page in PAGES.items() if _differs(DOCS / name, text := page())}
    if "--check" in arguments:
        wrong = [f"{DOCS / name}: not as generated" for name in stale] + list(complaints())
        for line in wrong:
            print(line, file=sys.stderr)
        if wrong:
            print("expected pages and figures as they are generated; run python -m docs.generate", file=sys.stderr)
        return int(bool(wrong))
    for name, text in stale.items():
        (DOCS / name).write_text(text)
        print(f"{DOCS / name}: written")
    return _renew_figures()


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text() != text


def _renew_figures() -> int:
    code = 0
    for name, text in published():
        figures = Figures()
        try:
            renewed = figures.renewed(text)
        except FigureError as error:
            # The other pages all the same: results may be renewed one benchmark after the other.
            print(f"{name}: {error}", file=sys.stderr)
            code = 2
            continue
        for line in figures.differences:
            print(f"{name}: {line}")
        if renewed != text:
            (ROOT / name).write_text(renewed)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
