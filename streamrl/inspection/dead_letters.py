"""`streamrl dlq`: a run's dead letters, that is records which the trainer could not decode, and sending them once more.

A dead letter holds the bytes of the refused record, where it stood and why it was refused. Invariants of sending, each
with a test of its name:
- a_dead_letter_is_retried_once: what was sent is told by a header on the topic itself, so a second call sends nothing,
  also when the same record became a dead letter twice;
- of_two_at_once_one_sends: who opens the run's transaction of retries shuts out whoever holds it, and only then looks
  what was sent;
- what_still_does_not_decode_stays: unless it is forced, and never what was cut.
"""

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvloop
from rich.console import Console
from rich.table import Table

from streamrl.bus.history import BusHistory, History
from streamrl.bus.port import Bus, Outgoing, Record, TransactionalPublisher
from streamrl.inspection.opening import index_of
from streamrl.inspection.source import broker_of, history_of, open_run
from streamrl.observability.record_index.entries import RETRY_OF, RefKind, number
from streamrl.observability.record_index.following import IndexFollower
from streamrl.schemas.codec import Headers, decode, named_error
from streamrl.schemas.errors import Superseded, UserError, WireError
from streamrl.schemas.messages import Message
from streamrl.schemas.plain_text import plain_lines, plain_text
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES

ATTEMPTS = 6
PAUSE_S = 0.5
"""Between two attempts of somebody whom another one has shut out, at most; it grows with each."""
SOME_REFUSED = 1
"""Exit code."""
WIDTH = 160
"""Columns of the table where there is no terminal to ask."""
HEAD_BYTES, ROW_BYTES = 256, 16
"""Of a value, as a hex dump."""
SHOWN = 2000
"""Characters of a message that decodes by now."""
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
T = TypeVar("T")
PREFIX = "dlq-"


class Origin(NamedTuple):
    """Where the refused record stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def mark(self) -> bytes:
        """As the content of the retry's header."""
        return f"{self.partition}@{self.offset}".encode()


@dataclass(frozen=True)
class DeadLetter:
    """One record of the dead-letters topic. ``origin`` None: its headers do not tell."""

    record: Record
    origin: Origin | None
    error_class: str
    reason: str
    cut_from: int | None

    @property
    def offset(self) -> int:
        """Its own offset, by which commands name it."""
        return self.record.offset

    @property
    def size(self) -> int:
        """Bytes of the refused value, as they are kept."""
        return len(self.record.value or b"")

    @property
    def headers(self) -> Headers:
        """The refused record's own headers."""
        # What begins with dlq- was added when it was refused.
        return tuple((name, content) for name, content in self.record.headers if not name.startswith(PREFIX))

    def decoded(self) -> Message:
        """What the bytes say to today's decoder.

        Raises:
            WireError: still nothing.
        """
        return decode(self.record.value, self.headers)

    def problem(self) -> str | None:
        """Why the bytes do not decode today, if so."""
        try:
            self.decoded()
        except WireError as error:
            return f"{type(error).__name__}: {error}"
        return None

    @property
    def target(self) -> str:
        """Where a retry of it goes."""
        return "nowhere known" if self.origin is None else f"{self.origin.topic}[{self.origin.partition}]"

    def retry(self) -> Outgoing:
        """The refused record once more: same bytes, key, partition and headers, and a header that says so."""
        assert self.origin is not None, "checked before it is sent"
        topic, partition, _ = self.origin
        # The partition is named, because it belongs to a length bucket: by its key it might go to another.
        return Outgoing(
            topic, self.record.value, self.record.key, partition, (*self.headers, (RETRY_OF, self.origin.mark))
        )


def dead_letter_of(record: Record) -> DeadLetter:
    """Read the headers of a dead letter."""
    named = {name: (content or b"").decode(errors="replace") for name, content in record.headers}
    return DeadLetter(
        record=record,
        origin=_origin(named),
        error_class=named_error(record.headers),
        reason=named.get("dlq-error", ""),
        cut_from=number(named.get("dlq-cut-from")),
    )


def _origin(named: dict[str, str]) -> Origin | None:
    topic, partition, offset = (
        named.get("dlq-topic"),
        number(named.get("dlq-partition")),
        number(named.get("dlq-offset")),
    )
    if not topic or partition is None or offset is None:
        return None
    return Origin(topic, partition, offset)


async def read_dead_letters(history: History, run: str) -> AsyncIterator[DeadLetter]:
    """All dead letters of a run, oldest first."""
    async for record in history.records(DEAD_LETTERS.full_name(run)):
        yield dead_letter_of(record)


async def read_dead_letter(history: History, run: str, offset: int) -> DeadLetter | None:
    """The dead letter at an offset, if there is one."""
    # The topic has a single partition, which is why an offset alone names a dead letter.
    found = await history.fetch(DEAD_LETTERS.full_name(run), [(0, offset)])
    return dead_letter_of(found[0, offset]) if found else None


class RetryAction(StrEnum):
    """What becomes of a dead letter."""

    SENT = "sent"
    WOULD_SEND = "would send"
    ALREADY = "already retried"
    REFUSED = "refused"


@dataclass(frozen=True)
class RetryOutcome:
    """One dead letter, and what was done about it."""

    dead_letter: DeadLetter
    action: RetryAction
    detail: str = ""


async def retry(
    bus: Bus, index: IndexFollower, offsets: Collection[int] | None, *, force: bool = False
) -> tuple[list[RetryOutcome], list[int]]:
    """Send the chosen dead letters once more, oldest first, but for those that were sent; and the offsets that name
    none, in which case nothing is sent.

    Args:
        bus: where they are sent to.
        index: of the run; it tells what was sent before.
        offsets: of the dead letters on their own topic; None: all.
        force: send also what does not decode.

    Raises:
        BusError: the broker refused one, or did not answer: call again, what arrived is not sent twice.
        UserError: others send retries of this run again and again.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await _retry_as_only_one(bus, index, offsets, force=force)
        except Superseded:
            # Somewhere between nothing and a moment, so that of two that shut each other out one gets through.
            await asyncio.sleep(random.uniform(0, PAUSE_S * (attempt + 1)))
    raise UserError(
        f"expected to be the only one who retries dead letters of run {index.run_name}, others do so; try again"
    )


async def _retry_as_only_one(
    bus: Bus, index: IndexFollower, offsets: Collection[int] | None, *, force: bool
) -> tuple[list[RetryOutcome], list[int]]:
    publisher = await bus.transactional(f"{index.run_name}.dlq-retry")
    try:
        # After it was opened: what an older holder has committed can be read from now on, and nothing more will come.
        plan, missing = await plan_retries(index, offsets, force=force)
        return (plan if missing else await _send(publisher, plan)), missing
    finally:
        await publisher.close()


async def _send(publisher: TransactionalPublisher, plan: Iterable[RetryOutcome]) -> list[RetryOutcome]:
    done = []
    for outcome in plan:
        if outcome.action is RetryAction.WOULD_SEND:
            # One after the other: what was sent is known when a later one fails.
            await publisher.commit([outcome.dead_letter.retry()])
            outcome = replace(outcome, action=RetryAction.SENT, detail=f"to {outcome.dead_letter.target}")
        done.append(outcome)
    return done


async def plan_retries(
    index: IndexFollower, offsets: Collection[int] | None, *, force: bool = False
) -> tuple[list[RetryOutcome], list[int]]:
    """What ``retry`` would do about each chosen dead letter, oldest first, and the offsets that name none."""
    await index.catch_up()
    topic = TRAJECTORIES.full_name(index.run_name)
    dead_letters = await _chosen(index.history, index.run_name, offsets)
    origins = {each.origin for each in dead_letters if each.origin is not None and each.origin.topic == topic}
    sent = index.index.refs(RefKind.RETRY, (origin[1:] for origin in origins))
    retried = {Origin(topic, row.of_partition, row.of_offset) for row in sent}
    outcomes = []
    for dead_letter in dead_letters:
        outcome = _judge(dead_letter, topic, retried, force=force)
        outcomes.append(outcome)
        # The same record may stand here twice; the second would send it again.
        if outcome.action is RetryAction.WOULD_SEND and dead_letter.origin is not None:
            retried.add(dead_letter.origin)
    return outcomes, sorted(set(offsets or ()) - {dead_letter.offset for dead_letter in dead_letters})


async def _chosen(history: History, run: str, offsets: Collection[int] | None) -> list[DeadLetter]:
    if offsets is None:
        return [dead_letter async for dead_letter in read_dead_letters(history, run)]
    found = await history.fetch(DEAD_LETTERS.full_name(run), ((0, offset) for offset in offsets))
    return [dead_letter_of(found[position]) for position in sorted(found)]


def _judge(dead_letter: DeadLetter, topic: str, retried: Collection[Origin], *, force: bool) -> RetryOutcome:
    origin = dead_letter.origin
    # Only trajectories are retried: other topics have one writer each, whose order a retry would break.
    if origin is None or origin.topic != topic:
        return RetryOutcome(
            dead_letter, RetryAction.REFUSED, f"expected a record of {topic}, it came from {origin or 'nowhere known'}"
        )
    # Before decoding: also what would decode, or is forced, is sent once only.
    if origin in retried:
        return RetryOutcome(dead_letter, RetryAction.ALREADY)
    # Half of the bytes can never decode, not even by force.
    if dead_letter.cut_from is not None:
        return RetryOutcome(
            dead_letter, RetryAction.REFUSED, f"only {dead_letter.size} of its {dead_letter.cut_from} bytes were kept"
        )
    problem = dead_letter.problem()
    if problem is not None and not force:
        return RetryOutcome(
            dead_letter, RetryAction.REFUSED, f"it still does not decode ({problem}); --force sends it all the same"
        )
    return RetryOutcome(dead_letter, RetryAction.WOULD_SEND)


def table_of(dead_letters: Sequence[DeadLetter]) -> Table:
    """One row a dead letter."""
    table = Table(box=None, pad_edge=False)
    for name in ("offset", "time", "from", "error", "reason", "size"):
        table.add_column(name, justify="right" if name in ("offset", "size") else "left", overflow="fold")
    for dead_letter in dead_letters:
        size = f"{dead_letter.size:,}" + (f" of {dead_letter.cut_from:,}" if dead_letter.cut_from else "")
        origin = str(dead_letter.origin or "?")
        table.add_row(
            str(dead_letter.offset),
            time_of(dead_letter),
            *map(plain_text, (origin, dead_letter.error_class, dead_letter.reason)),
            size,
        )
    return table


def time_of(dead_letter: DeadLetter) -> str:
    """When it was refused, in local time."""
    return datetime.fromtimestamp(dead_letter.record.timestamp).astimezone().isoformat(" ", "seconds")[:19]


def as_json(dead_letter: DeadLetter) -> dict[str, Any]:
    """A JSON-safe form, without the bytes."""
    return {
        "offset": dead_letter.offset,
        "timestamp": dead_letter.record.timestamp,
        "topic": dead_letter.origin and dead_letter.origin.topic,
        "partition": dead_letter.origin and dead_letter.origin.partition,
        "origin_offset": dead_letter.origin and dead_letter.origin.offset,
        "key": dead_letter.record.key,
        "error_class": dead_letter.error_class,
        "reason": dead_letter.reason,
        "size": dead_letter.size,
        "cut_from": dead_letter.cut_from,
    }


def lines_of(dead_letter: DeadLetter) -> Iterator[str]:
    """One dead letter in full."""
    yield f"dead letter {dead_letter.offset} of {time_of(dead_letter)}"
    yield f"from     {dead_letter.origin or 'nowhere known'}"
    yield f"key      {dead_letter.record.key!r}"
    yield f"error    {dead_letter.error_class}: {dead_letter.reason}"
    kept = f", cut from {dead_letter.cut_from:,}" if dead_letter.cut_from else ""
    yield f"value    {dead_letter.size:,} bytes{kept}"
    yield "headers"
    for name, content in dead_letter.record.headers:
        yield f"  {name} = {content!r}"
    yield from _hexdump(dead_letter.record.value or b"")
    yield from _decoded(dead_letter)


def _hexdump(value: bytes) -> Iterator[str]:
    for begin in range(0, min(len(value), HEAD_BYTES), ROW_BYTES):
        row = value[begin : begin + ROW_BYTES]
        # As hexdump -C shows it.
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        # Two digits and a blank for each byte, less the last blank.
        yield f"  {begin:06x}  {row.hex(' '):<{ROW_BYTES * 3 - 1}}  {text}"
    if len(value) > HEAD_BYTES:
        yield f"  … {len(value) - HEAD_BYTES:,} bytes more"


def _decoded(dead_letter: DeadLetter) -> Iterator[str]:
    try:
        message = dead_letter.decoded()
    except WireError as error:
        yield f"decoding it today: {type(error).__name__}: {error}"
        return
    yield f"decoding it today: a {message.SCHEMA}"
    # Arrays make it long; the first two thousand characters show what it is.
    text = json.dumps(message.model_dump(mode="json"), ensure_ascii=False, default=str)
    yield f"  {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}"


def retry_lines(outcomes: Iterable[RetryOutcome]) -> Iterator[str]:
    """What was done about each dead letter."""
    for outcome in outcomes:
        detail = f": {outcome.detail}" if outcome.detail else ""
        yield f"{outcome.dead_letter.offset}  {outcome.dead_letter.origin or '?'}  {outcome.action.value}{detail}"


def list_dead_letters(
    run: Path, export: Path | None, error_class: str | None, since: str | None, *, json_lines: bool
) -> int:
    """Print the dead letters that pass the filters; the exit code.

    Raises:
        UserError: no such run, or a time that cannot be read.
    """
    after = 0.0 if since is None else moment(since, time.time())

    async def read(history: History, name: str) -> list[DeadLetter]:
        return [dead_letter async for dead_letter in read_dead_letters(history, name) if wanted(dead_letter)]

    def wanted(dead_letter: DeadLetter) -> bool:
        return dead_letter.record.timestamp >= after and error_class in (None, dead_letter.error_class)

    dead_letters = _with_history(run, export, read)
    if json_lines:
        for dead_letter in dead_letters:
            print(json.dumps(as_json(dead_letter)))
        return 0
    if dead_letters:
        Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False).print(
            table_of(dead_letters)
        )
    print(f"{len(dead_letters)} dead letters")
    return 0


def show_dead_letter(run: Path, export: Path | None, offset: int) -> int:
    """Print one dead letter in full; the exit code.

    Raises:
        UserError: there is no such dead letter.
    """

    async def read(history: History, name: str) -> DeadLetter | None:
        return await read_dead_letter(history, name, offset)

    dead_letter = _with_history(run, export, read)
    if dead_letter is None:
        raise UserError(f"expected a dead letter at offset {offset}, found none; `streamrl dlq ls` lists them")
    print(plain_lines(lines_of(dead_letter)))
    return 0


def retry_dead_letters(run: Path, offsets: Collection[int], *, everything: bool, dry_run: bool, force: bool) -> int:
    """Send dead letters once more; the exit code is 1 if some were refused.

    Raises:
        UserError: neither offsets nor ``everything``, or an offset without a dead letter.
    """
    # Both named or neither: "all" has to be said, and not be what is left when no offset was typed.
    if bool(offsets) == everything:
        raise UserError("expected either offsets of dead letters or --all; `streamrl dlq ls` lists them")
    return _write(run, None if everything else offsets, dry_run=dry_run, force=force)


def _write(run: Path, offsets: Collection[int] | None, *, dry_run: bool, force: bool) -> int:
    from streamrl.bus.kafka.bus import KafkaBus

    past = open_run(run)
    # On the run's own data rather than a copy, because what is sent has to stay.
    with broker_of(past, None, _tell) as address, closing(index_of(past)) as index:
        bus = KafkaBus(past.settings.kafka.model_copy(update={"bootstrap_servers": address}))
        follower = IndexFollower(BusHistory(bus, "dlq"), past.name, index)
        carried_out = (
            plan_retries(follower, offsets, force=force) if dry_run else retry(bus, follower, offsets, force=force)
        )
        outcomes, missing = uvloop.run(carried_out)
    # All or nothing: a mistyped offset should not leave half of the work done.
    if missing:
        raise UserError(f"expected dead letters at {', '.join(map(str, missing))}, found none; nothing was sent")
    for line in retry_lines(outcomes):
        print(plain_text(line))
    counts = Counter(outcome.action for outcome in outcomes)
    print(", ".join(f"{count} {action.value}" for action, count in counts.items()) or "no dead letters")
    return SOME_REFUSED if counts[RetryAction.REFUSED] else 0


def moment(text: str, now: float) -> float:
    """A time such as ``30m``, ``2h``, ``1d`` ago, or an ISO date and time, in seconds since the epoch.

    Raises:
        UserError: it is neither.
    """
    if (match := _AGO.fullmatch(text.strip())) is not None:
        return now - float(match[1]) * _SECONDS[match[2]]
    # Without an offset from UTC in the text, Python takes it as local time.
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        raise UserError(f"expected a time such as '2h', '30m' or '2026-01-31T12:00', got {text!r}") from error


def _with_history(run: Path, export: Path | None, read: Callable[[History, str], Coroutine[Any, Any, T]]) -> T:
    past = open_run(run)
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-dlq-") as scratch,
        history_of(past, export, Path(scratch), _tell) as history,
    ):
        return uvloop.run(read(history, past.name))


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
