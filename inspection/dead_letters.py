"""What `streamrl dlq` does: opens the run, reads or sends, prints, and ends with a code."""

import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvloop
from rich.console import Console
from rich.table import Table

from bus.history import BusHistory, History
from bus.port import Bus, Outgoing, Record
from inspection.source import broker_of, history_of, open_run
from schemas.codec import Headers, decode, named_error
from schemas.errors import UserError, WireError
from schemas.messages import Message
from schemas.topics import DEAD_LETTERS, TRAJECTORIES

# A dead letter: the bytes of a refused record, where it stood, and why it was refused. Reads, and sends nothing.

PREFIX = "dlq-"
RETRY_OF = "dlq-retry-of"
"""Header of a record that was sent once more: partition and offset of the refused one on the same topic."""


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

    def retry(self) -> Outgoing:
        """The refused record once more: same bytes, key, partition and headers, and a header that says so."""
        assert self.origin is not None, "checked before it is sent"
        topic, partition, _ = self.origin
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
        cut_from=_number(named.get("dlq-cut-from")),
    )


def _origin(named: dict[str, str]) -> Origin | None:
    topic, partition, offset = (
        named.get("dlq-topic"),
        _number(named.get("dlq-partition")),
        _number(named.get("dlq-offset")),
    )
    if not topic or partition is None or offset is None:
        return None
    return Origin(topic, partition, offset)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


async def read_dead_letters(history: History, run: str) -> AsyncIterator[DeadLetter]:
    """All dead letters of a run, oldest first."""
    async for record in history.records(DEAD_LETTERS.full_name(run)):
        yield dead_letter_of(record)


async def read_dead_letter(history: History, run: str, offset: int) -> DeadLetter | None:
    """The dead letter at an offset, if there is one."""
    found = await history.fetch(DEAD_LETTERS.full_name(run), [(0, offset)])
    return dead_letter_of(found[0, offset]) if found else None


# Sends dead letters once more to where they came from. Invariants, each with a test of its name: -
# a_letter_is_retried_once: what was sent is told by a header on the topic itself, so a second call sends nothing,
# also when the same record became a dead letter twice; - what_still_does_not_decode_stays: unless it is forced, and
# never what was cut.


class RetryAction(StrEnum):
    """What becomes of a letter."""

    SENT = "sent"
    WOULD_SEND = "would send"
    ALREADY = "already retried"
    REFUSED = "refused"


@dataclass(frozen=True)
class RetryOutcome:
    """One letter, and what was done about it."""

    letter: DeadLetter
    action: RetryAction
    detail: str = ""


async def plan_retries(
    history: History, run: str, offsets: Collection[int] | None, *, force: bool = False
) -> tuple[list[RetryOutcome], list[int]]:
    """What to do about each chosen letter, oldest first, and the offsets that name none.

    Args:
        history: of the run.
        run: its name.
        offsets: of the letters on their own topic; None: all.
        force: send also what does not decode.
    """
    topic = TRAJECTORIES.full_name(run)
    letters = [
        letter async for letter in read_dead_letters(history, run) if offsets is None or letter.offset in offsets
    ]
    retried = await _already_retried(history, topic) if letters else set()
    outcomes = []
    for letter in letters:
        outcome = _judge(letter, topic, retried, force=force)
        outcomes.append(outcome)
        if outcome.action is RetryAction.WOULD_SEND and letter.origin is not None:
            retried.add(letter.origin)
    return outcomes, sorted(set(offsets or ()) - {letter.offset for letter in letters})


async def send_retries(bus: Bus, outcomes: Collection[RetryOutcome]) -> list[RetryOutcome]:
    """Carry a plan out; returns when the broker has every record.

    Raises:
        BusError: the broker refused one, or did not answer: call again, what arrived is not sent twice.
    """
    done = []
    publisher = await bus.publisher("dlq-retry")
    try:
        for outcome in outcomes:
            if outcome.action is not RetryAction.WOULD_SEND:
                done.append(outcome)
                continue
            position = await publisher.publish(outcome.letter.retry())
            done.append(RetryOutcome(outcome.letter, RetryAction.SENT, f"as {Origin(*position)}"))
    finally:
        await publisher.close()
    return done


def _judge(letter: DeadLetter, topic: str, retried: Collection[Origin], *, force: bool) -> RetryOutcome:
    origin = letter.origin
    if origin is None or origin.topic != topic:
        return RetryOutcome(
            letter, RetryAction.REFUSED, f"expected a record of {topic}, it came from {origin or 'nowhere known'}"
        )
    if origin in retried:
        return RetryOutcome(letter, RetryAction.ALREADY)
    if letter.cut_from is not None:
        return RetryOutcome(letter, RetryAction.REFUSED, f"only {letter.size} of its {letter.cut_from} bytes were kept")
    problem = letter.problem()
    if problem is not None and not force:
        return RetryOutcome(
            letter, RetryAction.REFUSED, f"it still does not decode ({problem}); --force sends it all the same"
        )
    return RetryOutcome(letter, RetryAction.WOULD_SEND)


async def _already_retried(history: History, topic: str) -> set[Origin]:
    found = set()
    async for record in history.records(topic):
        for name, content in record.headers:
            if name == RETRY_OF and content is not None:
                partition, _, offset = content.decode(errors="replace").partition("@")
                if partition.isdecimal() and offset.isdecimal():
                    found.add(Origin(topic, int(partition), int(offset)))
    return found


# Dead letters as text: a table of them, one in full, and what a retry did.

HEAD_BYTES = 256
ROW_BYTES = 16
SHOWN = 2000


def table_of(letters: Sequence[DeadLetter]) -> Table:
    """One row a letter."""
    table = Table(box=None, pad_edge=False)
    for name in ("offset", "time", "from", "error", "reason", "size"):
        table.add_column(name, justify="right" if name in ("offset", "size") else "left", overflow="fold")
    for letter in letters:
        size = f"{letter.size:,}" + (f" of {letter.cut_from:,}" if letter.cut_from else "")
        origin = str(letter.origin or "?")
        table.add_row(str(letter.offset), time_of(letter), origin, letter.error_class, letter.reason, size)
    return table


def time_of(letter: DeadLetter) -> str:
    """When it was refused, in local time."""
    return datetime.fromtimestamp(letter.record.timestamp).astimezone().isoformat(" ", "seconds")[:19]


def as_json(letter: DeadLetter) -> dict[str, Any]:
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


def lines_of(letter: DeadLetter) -> Iterator[str]:
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


def _decoded(letter: DeadLetter) -> Iterator[str]:
    try:
        message = letter.decoded()
    except WireError as error:
        yield f"decoding it today: {type(error).__name__}: {error}"
        return
    yield f"decoding it today: a {message.SCHEMA}"
    text = json.dumps(message.model_dump(mode="json"), ensure_ascii=False, default=str)
    yield f"  {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}"


def retry_lines(outcomes: Iterable[RetryOutcome]) -> Iterator[str]:
    """What was done about each letter."""
    for outcome in outcomes:
        detail = f": {outcome.detail}" if outcome.detail else ""
        yield f"{outcome.letter.offset}  {outcome.letter.origin or '?'}  {outcome.action.value}{detail}"


SOME_REFUSED = 1
WIDTH = 160
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
T = TypeVar("T")


def list_dead_letters(
    run: Path, export: Path | None, error_class: str | None, since: str | None, *, json_lines: bool
) -> int:
    """Print the letters that pass the filters; the exit code.

    Raises:
        UserError: no such run, or a time that cannot be read.
    """
    after = 0.0 if since is None else moment(since, time.time())

    async def read(history: History, name: str) -> list[DeadLetter]:
        return [letter async for letter in read_dead_letters(history, name) if wanted(letter)]

    def wanted(letter: DeadLetter) -> bool:
        return letter.record.timestamp >= after and error_class in (None, letter.error_class)

    letters = _with_history(run, export, read)
    if json_lines:
        for letter in letters:
            print(json.dumps(as_json(letter)))
        return 0
    if letters:
        Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False).print(table_of(letters))
    print(f"{len(letters)} dead letters")
    return 0


def show_dead_letter(run: Path, export: Path | None, offset: int) -> int:
    """Print one letter in full; the exit code.

    Raises:
        UserError: there is no such letter.
    """

    async def read(history: History, name: str) -> DeadLetter | None:
        return await read_dead_letter(history, name, offset)

    letter = _with_history(run, export, read)
    if letter is None:
        raise UserError(f"expected a dead letter at offset {offset}, found none; `streamrl dlq ls` lists them")
    print("\n".join(lines_of(letter)))
    return 0


def retry_dead_letters(run: Path, offsets: Collection[int], *, everything: bool, dry_run: bool, force: bool) -> int:
    """Send letters once more; the exit code is 1 if some were refused.

    Raises:
        UserError: neither offsets nor ``everything``, or an offset without a letter.
    """
    if bool(offsets) == everything:
        raise UserError("expected either offsets of dead letters or --all; `streamrl dlq ls` lists them")
    return _write(run, None if everything else offsets, dry_run=dry_run, force=force)


def _write(run: Path, offsets: Collection[int] | None, *, dry_run: bool, force: bool) -> int:
    from bus.kafka.bus import KafkaBus

    past = open_run(run)
    with broker_of(past, None, _tell) as address:
        bus = KafkaBus(past.settings.kafka.model_copy(update={"bootstrap_servers": address}))
        plan, missing = uvloop.run(plan_retries(BusHistory(bus, "dlq"), past.name, offsets, force=force))
        if missing:
            raise UserError(f"expected dead letters at {', '.join(map(str, missing))}, found none; nothing was sent")
        outcomes = plan if dry_run else uvloop.run(send_retries(bus, plan))
    for line in retry_lines(outcomes):
        print(line)
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
