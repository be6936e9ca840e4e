"""The topics reference: what travels where and how long it is kept, from the catalogue and the messages' types."""

import re
import typing
from collections.abc import Iterator
from typing import Any

from deploy.manual.tables import code, table
from schemas.messages.base import Message
from schemas.messages.control import Control
from schemas.wire.topics import CATALOGUE, DAY_MS, HOUR_MS, Topic

HEAD = """# Topics

<!-- Written by `python -m deploy.manual` from the catalogue; do not edit. -->

A topic's full name is the run's name, a dot, and the name below. `streamrl topics apply --run NAME` makes a broker
match this page, `streamrl topics diff --run NAME` says what differs. Keys and headers are readable text, so `kcat` and
Kafka UI show them; `streamrl tail TOPIC` decodes the values. [Wire format](architecture.md#wire-format) says what the
bytes are.
"""


def topics_page() -> str:
    """The page as Markdown."""
    head = ("topic", "message", "key", "partitions", "kept", "largest record", "writers", "readers")
    lines = [HEAD, *table(head, [_row(topic) for topic in CATALOGUE]), ""]
    for topic in CATALOGUE:
        for message in _messages(topic):
            lines += _message(topic, message)
    return "\n".join(lines).rstrip() + "\n"


def _row(topic: Topic) -> tuple[str, ...]:
    messages = ", ".join(code(message.__name__) for message in _messages(topic))
    return (
        code(topic.name),
        messages or "another topic's bytes, the reason in the headers",
        topic.key,
        str(topic.partitions) if topic.partitions else "buckets × shards",
        _kept(topic),
        f"{topic.max_message_bytes / (1 << 20):.1f} MiB",
        ", ".join(topic.writers),
        ", ".join(topic.readers),
    )


def _messages(topic: Topic) -> tuple[type[Message], ...]:
    """Every kind of message on a topic: of control messages, which share a schema, all that there are."""
    if topic.message is None:
        return ()
    kinds = tuple(Control.__subclasses__()) if issubclass(topic.message, Control) else (topic.message,)
    return kinds + topic.also


def _kept(topic: Topic) -> str:
    if topic.cleanup_policy == "compact":
        return "the last of each key"
    unit, name = (DAY_MS, "day") if topic.retention_ms >= DAY_MS else (HOUR_MS, "hour")
    count = topic.retention_ms // unit
    return f"{count} {name}{'' if count == 1 else 's'}"


def _message(topic: Topic, message: type[Message]) -> Iterator[str]:
    summary, _, more = (message.__doc__ or "").partition("\n\n")
    yield f"## {message.__name__}"
    yield ""
    schema = f"schema {code(message.SCHEMA)}, version {message.VERSION}"
    yield f"On {code(topic.name)}, {schema}. {_prose(summary)}"
    yield ""
    if more.strip():
        yield _prose(more)
        yield ""
    yield from table(("field", "type", ""), list(_fields(message)))
    yield ""


def _fields(message: type[Message]) -> Iterator[tuple[str, str, str]]:
    arrays = message.array_fields()
    for name, field in message.model_fields.items():
        kind = f"array of {arrays[name]}" if name in arrays else _kind(field.annotation)
        yield code(name), kind, "" if field.is_required() else "may be left out"


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


def _prose(text: str) -> str:
    return re.sub(r"``", "`", " ".join(text.split()))
