"""Dead letters as text: a table of them, one in full, and what a retry did."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.table import Table

from deploy.inspection.letters.letters import Letter
from deploy.inspection.letters.retrying import Outcome
from schemas.errors import WireError

HEAD_BYTES = 256
ROW_BYTES = 16
SHOWN = 2000


def table_of(letters: Sequence[Letter]) -> Table:
    """One row a letter."""
    table = Table(box=None, pad_edge=False)
    for name in ("offset", "time", "from", "error", "reason", "size"):
        table.add_column(name, justify="right" if name in ("offset", "size") else "left", overflow="fold")
    for letter in letters:
        size = f"{letter.size:,}" + (f" of {letter.cut_from:,}" if letter.cut_from else "")
        origin = str(letter.origin or "?")
        table.add_row(str(letter.offset), time_of(letter), origin, letter.error_class, letter.reason, size)
    return table


def time_of(letter: Letter) -> str:
    """When it was refused, in local time."""
    return datetime.fromtimestamp(letter.record.timestamp).astimezone().isoformat(" ", "seconds")[:19]


def as_json(letter: Letter) -> dict[str, Any]:
    """A JSON-safe form, without the bytes."""
    return {
        "offset": letter.offset,
        "timestamp": letter.record.timestamp,
        "topic": letter.origin and letter.origin.topic,
        "partition": letter.origin and letter.origin.partition,
        "origin_offset": letter.origin and letter.origin.offset,
        "key": letter.record.key,
        "error_class": letter.error_class,
        "reason": letter.reason,
        "size": letter.size,
        "cut_from": letter.cut_from,
    }


def lines_of(letter: Letter) -> Iterator[str]:
    """One letter in full."""
    yield f"dead letter {letter.offset} of {time_of(letter)}"
    yield f"from     {letter.origin or 'nowhere known'}"
    yield f"key      {letter.record.key!r}"
    yield f"error    {letter.error_class}: {letter.reason}"
    kept = f", cut from {letter.cut_from:,}" if letter.cut_from else ""
    yield f"value    {letter.size:,} bytes{kept}"
    yield "headers"
    for name, content in letter.record.headers:
        yield f"  {name} = {content!r}"
    yield from _hexdump(letter.record.value or b"")
    yield from _decoded(letter)


def _hexdump(value: bytes) -> Iterator[str]:
    for begin in range(0, min(len(value), HEAD_BYTES), ROW_BYTES):
        row = value[begin : begin + ROW_BYTES]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"  {begin:06x}  {row.hex(' '):<{ROW_BYTES * 3 - 1}}  {text}"
    if len(value) > HEAD_BYTES:
        yield f"  … {len(value) - HEAD_BYTES:,} bytes more"


def _decoded(letter: Letter) -> Iterator[str]:
    try:
        message = letter.decoded()
    except WireError as error:
        yield f"decoding it today: {type(error).__name__}: {error}"
        return
    yield f"decoding it today: a {message.SCHEMA}"
    text = json.dumps(message.model_dump(mode="json"), ensure_ascii=False, default=str)
    yield f"  {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}"


def retry_lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """What was done about each letter."""
    for outcome in outcomes:
        detail = f": {outcome.detail}" if outcome.detail else ""
        yield f"{outcome.letter.offset}  {outcome.letter.origin or '?'}  {outcome.action.value}{detail}"
