"""What `streamrl tail` does: attaches, reads, filters, prints, and ends with a code."""

import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from difflib import get_close_matches

import uvloop

from deploy.bus.cluster.times import offsets_since
from deploy.bus.connection import partition_counts
from deploy.surveys.attachment import CLIENT_ID, Attachment
from deploy.surveys.tailing.fields import Seen, check_fields, seen
from deploy.surveys.tailing.filters import Filter, parse_filter
from deploy.surveys.tailing.following import Following
from deploy.surveys.tailing.rendering import json_of, line_of
from deploy.surveys.tailing.starts import Extents, Start, parse_start
from schemas.errors import TopicMissing, UserError
from schemas.ports.bus import TopicPartition
from schemas.wire.topics import CATALOGUE, Topic

DEFAULT_START = "-10"
INTERRUPTED = 130


@dataclass(frozen=True)
class Wish:
    """What was asked for. ``most`` None: no limit."""

    topic: str
    start: str = DEFAULT_START
    expression: str = ""
    partitions: Collection[int] = ()
    most: int | None = None
    follow: bool = False
    as_json: bool = False


def tail(attachment: Attachment, wish: Wish) -> int:
    """Print records; the exit code, 130 if it was interrupted.

    Raises:
        UserError: no such run, topic or partition; a start or filter that cannot be read.
    """
    start, expression = parse_start(wish.start, time.time()), parse_filter(wish.expression) if wish.expression else None
    try:
        uvloop.run(_tail(attachment, wish, start, expression))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _tail(attachment: Attachment, wish: Wish, start: Start, expression: Filter | None) -> None:
    name, topic = await named_topic(attachment, wish.topic)
    if expression is not None:
        check_fields(expression.fields, topic)

    async def since(extents: Extents, moment: float) -> Mapping[TopicPartition, int]:
        return await offsets_since(attachment.kafka, extents, moment)

    partitions = frozenset(wish.partitions) or None
    following = Following(attachment.bus, name, since, _tell, partitions)
    printed = 0
    try:
        async with aclosing(following.records(start, follow=wish.follow)) as records:
            async for record in records:
                each = seen(record, topic)
                if expression is None or expression.accepts(each.field):
                    _show(each, as_json=wish.as_json)
                    printed += 1
                    if printed == wish.most:
                        return
    except TopicMissing as error:
        raise UserError(f"{error}, not {', '.join(map(str, sorted(wish.partitions)))}") from error


async def named_topic(attachment: Attachment, name: str) -> tuple[str, Topic | None]:
    """The full name, and the catalogue's entry if there is one.

    Raises:
        UserError: the broker has no such topic.
    """
    for topic in CATALOGUE:
        if name == topic.name:
            return (await attachment.with_run()).name_of(topic), topic
    there = await partition_counts(attachment.kafka, CLIENT_ID)
    if name in there:
        return name, next((topic for topic in CATALOGUE if name.endswith(f".{topic.name}")), None)
    short = [topic.name for topic in CATALOGUE]
    close = get_close_matches(name, [*short, *there], n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(short)}, or full names on the broker"
    raise UserError(f"expected a topic, got {name!r}; {hint}")


def _show(each: Seen, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json_of(each)), flush=True)
        return
    line = line_of(each)
    if sys.stdout.isatty():
        line = line[: shutil.get_terminal_size().columns]
    print(line, flush=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
