"""`streamrl dlq`: lists a run's dead letters, which are records that the trainer could not decode, and retries them.

A dead letter holds the bytes of the refused record, its position and the reason. Invariants of a retry, each with a
test of its name:
- a_dead_letter_is_retried_once: a header on the topic marks each retried record, so a second call sends nothing, even
  if the same record became a dead letter twice;
- one_of_two_concurrent_retries_sends: opening the run's transaction of retries fences its older holder, and a retry
  looks for sent records only after that;
- undecodable_records_are_refused: unless the user forces it. A record whose bytes were cut is always refused.
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
from streamrl.schemas.codec import Headers, dead_letter_error_class, decode
from streamrl.schemas.errors import Superseded, UserError, WireError
from streamrl.schemas.messages import Message
from streamrl.schemas.plain_text import plain_lines, plain_text
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES

ATTEMPTS = 6
PAUSE_S = 0.5
"""Longest wait in seconds after the first attempt that another process has fenced. It grows with each attempt."""
SOME_REFUSED = 1
"""Exit code of a retry that refused some dead letters."""
WIDTH = 160
"""Characters in a line of the table where standard output is not a terminal."""
HEAD_BYTES, ROW_BYTES = 256, 16
"""Bytes of a value that the hex dump shows, and bytes in a row of it."""
SHOWN = 2000
"""Characters shown of a message that decodes today."""
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
T = TypeVar("T")
PREFIX = "dlq-"


class Origin(NamedTuple):
    """The position of the refused record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def mark(self) -> bytes:
        """The content of the retry's header."""
        return f"{self.partition}@{self.offset}".encode()


@dataclass(frozen=True)
class DeadLetter:
    """One record of the dead-letters topic.

    ``origin`` is None if the headers do not name it. ``cut_from``: the full size in bytes of a value that was cut.
    """

    record: Record
    origin: Origin | None
    error_class: str
    reason: str
    cut_from: int | None

    @property
    def offset(self) -> int:
        """The dead letter's own offset, by which commands name it."""
        return self.record.offset

    @property
    def size(self) -> int:
        """Kept bytes of the refused value."""
        return len(self.record.value or b"")

    @property
    def headers(self) -> Headers:
        """The refused record's own headers."""
        # Headers that start with dlq- were added when the record was refused.
        return tuple((name, content) for name, content in self.record.headers if not name.startswith(PREFIX))

    def decoded(self) -> Message:
        """The message, if today's decoder can read the bytes.

        Raises:
            WireError: it cannot.
        """
        return decode(self.record.value, self.headers)

    def problem(self) -> str | None:
        """Why the bytes do not decode today; None if they do."""
        try:
            self.decoded()
        except WireError as error:
            return f"{type(error).__name__}: {error}"
        return None

    @property
    def target(self) -> str:
        """The topic and partition of a retry."""
        return "an unknown position" if self.origin is None else f"{self.origin.topic}[{self.origin.partition}]"

    def retry(self) -> Outgoing:
        """The refused record again: same bytes, key, partition and headers, plus a header that marks the retry."""
        assert self.origin is not None, "checked before it is sent"
        topic, partition, _ = self.origin
        # The partition belongs to a length bucket. Chosen by the key, it might be another one.
        return Outgoing(
            topic, self.record.value, self.record.key, partition, (*self.headers, (RETRY_OF, self.origin.mark))
        )


def dead_letter_of(record: Record) -> DeadLetter:
    """Read the headers of a dead letter."""
    named = {name: (content or b"").decode(errors="replace") for name, content in record.headers}
    return DeadLetter(
        record=record,
        origin=_origin(named),
        error_class=dead_letter_error_class(record.headers),
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
    """What a retry does with a dead letter."""

    SENT = "sent"
    WOULD_SEND = "would send"
    ALREADY = "already retried"
    REFUSED = "refused"


@dataclass(frozen=True)
class RetryOutcome:
    """One dead letter, and what a retry did with it."""

    dead_letter: DeadLetter
    action: RetryAction
    detail: str = ""


async def retry(
    bus: Bus, index: IndexFollower, offsets: Collection[int] | None, *, force: bool = False
) -> tuple[list[RetryOutcome], list[int]]:
    """Send the chosen dead letters again, oldest first, except those that were retried before.

    Returns the outcomes, and the offsets at which there is no dead letter. If there are any, nothing is sent.

    Args:
        bus: where to send them.
        index: the run's index, which knows the records that were retried before.
        offsets: offsets of dead letters on their own topic; None: all.
        force: also send records that do not decode.

    Raises:
        BusError: the broker refused a record, or did not answer. Call again: no record is sent twice.
        UserError: other processes kept sending retries of this run.
    """
    for attempt in range(ATTEMPTS):
        try:
            return await _retry_as_only_one(bus, index, offsets, force=force)
        except Superseded:
            # A random time, so that one of two processes that fence each other gets through.
            await asyncio.sleep(random.uniform(0, PAUSE_S * (attempt + 1)))
    raise UserError(
        f"expected no other process to retry dead letters of run {index.run_name}, found one; try again later"
    )


async def _retry_as_only_one(
    bus: Bus, index: IndexFollower, offsets: Collection[int] | None, *, force: bool
) -> tuple[list[RetryOutcome], list[int]]:
    publisher = await bus.transactional(f"{index.run_name}.dlq-retry")
    try:
        # Only after opening it: from now on, all commits of an older holder can be read, and it cannot make another.
        plan, missing = await plan_retries(index, offsets, force=force)
        return (plan if missing else await _send(publisher, plan)), missing
    finally:
        await publisher.close()


async def _send(publisher: TransactionalPublisher, plan: Iterable[RetryOutcome]) -> list[RetryOutcome]:
    done = []
    for outcome in plan:
        if outcome.action is RetryAction.WOULD_SEND:
            # One commit a record: if a later one fails, it is known which were sent.
            await publisher.commit([outcome.dead_letter.retry()])
            outcome = replace(outcome, action=RetryAction.SENT, detail=f"to {outcome.dead_letter.target}")
        done.append(outcome)
    return done


async def plan_retries(
    index: IndexFollower, offsets: Collection[int] | None, *, force: bool = False
) -> tuple[list[RetryOutcome], list[int]]:
    """What ``retry`` would do with each chosen dead letter, oldest first; the offsets without a dead letter."""
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
        # The same record may be a dead letter twice, and must not be sent twice.
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
            dead_letter,
            RetryAction.REFUSED,
            f"expected a record of {topic}, it came from {origin or 'an unknown position'}",
        )
    # Before decoding, so that no record is sent twice, not even by force.
    if origin in retried:
        return RetryOutcome(dead_letter, RetryAction.ALREADY)
    # A part of the bytes can never decode, so ``force`` does not apply.
    if dead_letter.cut_from is not None:
        return RetryOutcome(
            dead_letter, RetryAction.REFUSED, f"only {dead_letter.size} of its {dead_letter.cut_from} bytes were kept"
        )
    problem = dead_letter.problem()
    if problem is not None and not force:
        return RetryOutcome(
            dead_letter, RetryAction.REFUSED, f"it still does not decode ({problem}); --force sends it nevertheless"
        )
    return RetryOutcome(dead_letter, RetryAction.WOULD_SEND)


def table_of(dead_letters: Sequence[DeadLetter]) -> Table:
    """A table with one row per dead letter."""
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
    """The local time at which the record was refused."""
    return datetime.fromtimestamp(dead_letter.record.timestamp).astimezone().isoformat(" ", "seconds")[:19]


def as_json(dead_letter: DeadLetter) -> dict[str, Any]:
    """The dead letter as JSON-safe data, without the bytes."""
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
    """Lines that show one dead letter in full."""
    yield f"dead letter {dead_letter.offset} of {time_of(dead_letter)}"
    yield f"from     {dead_letter.origin or 'an unknown position'}"
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
        # Same format as hexdump -C.
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
    # Arrays make the text long. The first ``SHOWN`` characters are enough to recognise the message.
    text = json.dumps(message.model_dump(mode="json"), ensure_ascii=False, default=str)
    yield f"  {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}"


def retry_lines(outcomes: Iterable[RetryOutcome]) -> Iterator[str]:
    """Lines with the outcome for each dead letter."""
    for outcome in outcomes:
        detail = f": {outcome.detail}" if outcome.detail else ""
        yield f"{outcome.dead_letter.offset}  {outcome.dead_letter.origin or '?'}  {outcome.action.value}{detail}"


def list_dead_letters(
    run: Path, export: Path | None, error_class: str | None, since: str | None, *, json_lines: bool
) -> int:
    """Print the dead letters that pass the filters, and return the exit code.

    Raises:
        UserError: there is no such run, or ``since`` is not a time.
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
    """Print one dead letter in full, and return the exit code.

    Raises:
        UserError: there is no such dead letter.
    """

    async def read(history: History, name: str) -> DeadLetter | None:
        return await read_dead_letter(history, name, offset)

    dead_letter = _with_history(run, export, read)
    if dead_letter is None:
        raise UserError(
            f"expected a dead letter at offset {offset}, found none; `streamrl dlq ls --run {run}` lists them"
        )
    print(plain_lines(lines_of(dead_letter)))
    return 0


def retry_dead_letters(run: Path, offsets: Collection[int], *, everything: bool, dry_run: bool, force: bool) -> int:
    """Send dead letters again. The exit code is 1 if some were refused.

    Raises:
        UserError: both or none of ``offsets`` and ``everything`` were given, or an offset has no dead letter.
    """
    # The user must ask for all of them: a forgotten offset must not mean "all".
    if bool(offsets) == everything:
        raise UserError(f"expected either offsets of dead letters or --all; `streamrl dlq ls --run {run}` lists them")
    return _write(run, None if everything else offsets, dry_run=dry_run, force=force)


def _write(run: Path, offsets: Collection[int] | None, *, dry_run: bool, force: bool) -> int:
    from streamrl.bus.kafka.bus import KafkaBus

    past = open_run(run)
    # On the run's own data rather than on a copy, because the retries must stay.
    with broker_of(past, None, _print_to_stderr) as address, closing(index_of(past)) as index:
        bus = KafkaBus(past.settings.kafka.model_copy(update={"bootstrap_servers": address}))
        follower = IndexFollower(BusHistory(bus, "dlq"), past.name, index)
        carried_out = (
            plan_retries(follower, offsets, force=force) if dry_run else retry(bus, follower, offsets, force=force)
        )
        outcomes, missing = uvloop.run(carried_out)
    # All or nothing: after a mistyped offset, the user should not find half of the work done.
    if missing:
        raise UserError(f"expected dead letters at {', '.join(map(str, missing))}, found none; nothing was sent")
    for line in retry_lines(outcomes):
        print(plain_text(line))
    counts = Counter(outcome.action for outcome in outcomes)
    print(", ".join(f"{count} {action.value}" for action, count in counts.items()) or "no dead letters")
    return SOME_REFUSED if counts[RetryAction.REFUSED] else 0


def moment(text: str, now: float) -> float:
    """Seconds since the epoch of a time: ``30m``, ``2h`` or ``1d`` before ``now``, or an ISO date and time.

    Raises:
        UserError: the text is neither.
    """
    if (match := _AGO.fullmatch(text.strip())) is not None:
        return now - float(match[1]) * _SECONDS[match[2]]
    # Without an offset from UTC, Python takes the text as local time.
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        raise UserError(f"expected a time such as '2h', '30m' or '2026-01-31T12:00', got {text!r}") from error


def _with_history(run: Path, export: Path | None, read: Callable[[History, str], Coroutine[Any, Any, T]]) -> T:
    past = open_run(run)
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-dlq-") as scratch,
        history_of(past, export, Path(scratch), _print_to_stderr) as history,
    ):
        return uvloop.run(read(history, past.name))


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
