"""`streamrl tail`: prints the records of a topic from a start on, and new ones, filtered and line by line.

Invariant following_survives_gaps_and_outages: if retention deletes records or the broker is away for a while, following
reports it and continues.
"""

import asyncio
import heapq
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from difflib import get_close_matches

import uvloop

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.kafka.cluster import offsets_since
from streamrl.bus.kafka.connection import partition_counts
from streamrl.bus.port import Bus, Record, TopicPartition
from streamrl.inspection.dead_letters import moment
from streamrl.inspection.diagnostics.connect import CLIENT_ID, RunConnection
from streamrl.inspection.diagnostics.fields import ShownRecord, check_fields, json_of, line_of, shown_record
from streamrl.inspection.diagnostics.filters import Filter, parse_filter
from streamrl.schemas import stopping
from streamrl.schemas.errors import BusUnavailable, DataLossRefused, TopicMissing, UserError
from streamrl.schemas.topics import CATALOGUE, Topic

Extents = Mapping[TopicPartition, Extent]
OffsetsSince = Callable[[Extents, float], Awaitable[Mapping[TopicPartition, int]]]
"""Returns the first offsets at or after a time, by partition."""
POLL_S = 0.5
RETRY_S = 2.0
MARKERS_TOO = 2
"""First guess of offsets per record: with transactions of one record, every second offset is a marker."""
MOST_RECENT = 100_000
"""Most records that are kept in memory to sort them by time."""
DEFAULT_START = "-10"


@dataclass(frozen=True)
class TailRequest:
    """The command's options. ``start``: see ``parse_start``. ``most`` None: no limit."""

    topic: str
    start: str = DEFAULT_START
    expression: str = ""
    partitions: Collection[int] = ()
    most: int | None = None
    follow: bool = False
    as_json: bool = False


def tail(connection: RunConnection, request: TailRequest) -> int:
    """Print records, and return the exit code, which is the signal's if one arrived.

    Raises:
        UserError: there is no such run, topic or partition, or the start or filter is not valid.
    """
    start, expression = (
        parse_start(request.start, time.time()),
        parse_filter(request.expression) if request.expression else None,
    )
    try:
        uvloop.run(_tail(connection, request, start, expression))
    except KeyboardInterrupt:
        return stopping.exit_code()
    except BrokenPipeError:  # the reader of our output has closed it
        # Python flushes standard output again on exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _tail(connection: RunConnection, request: TailRequest, start: "Start", expression: Filter | None) -> None:
    name, topic = await named_topic(connection, request.topic)
    if expression is not None:
        check_fields(expression.fields, topic)

    async def since(extents: Extents, moment: float) -> Mapping[TopicPartition, int]:
        return await offsets_since(connection.kafka, extents, moment)

    partitions = frozenset(request.partitions) or None
    following = TopicReader(connection.bus, name, since, _print_note, partitions)
    printed = 0
    try:
        # Closed as soon as enough is printed. Otherwise the subscription would stay open until garbage collection.
        async with aclosing(following.records(start, follow=request.follow)) as records:
            async for record in records:
                each = shown_record(record, topic, connection.reward_weights)
                if expression is None or expression.accepts(each.field):
                    _show(each, as_json=request.as_json)
                    printed += 1
                    if printed == request.most:
                        return
    except TopicMissing as error:
        raise UserError(str(error)) from error
    if not printed:
        found = "no record matches" if expression is not None else "there is no record"
        more = "" if request.start == "beginning" else "; `--from beginning` reads all records"
        _print_note(f"{found} in {name} from {request.start} on{more}")


async def named_topic(connection: RunConnection, name: str) -> tuple[str, Topic | None]:
    """The full name of a topic, and its entry in the catalogue if there is one.

    Raises:
        UserError: the broker has no such topic.
    """
    # A short name is a topic of the run; a full name may be any topic of the broker.
    for topic in CATALOGUE:
        if name == topic.name:
            return (await connection.with_run()).name_of(topic), topic
    there = await partition_counts(connection.kafka, CLIENT_ID)
    if name in there:
        return name, next((topic for topic in CATALOGUE if name.endswith(f".{topic.name}")), None)
    short = [topic.name for topic in CATALOGUE]
    close = get_close_matches(name, [*short, *there], n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(short)}, or full names on the broker"
    raise UserError(f"expected a topic, got {name!r}; {hint}")


def _show(each: ShownRecord, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json_of(each)), flush=True)
        return
    line = line_of(each)
    if sys.stdout.isatty():
        # One line per record: a longer line is cut, and --json has all of it.
        line = line[: shutil.get_terminal_size().columns]
    print(line, flush=True)


def _print_note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Last:
    """Start with the newest ``count`` records of the whole topic."""

    count: int


@dataclass(frozen=True)
class At:
    """Start at this offset in every partition."""

    offset: int


@dataclass(frozen=True)
class Since:
    """Start at a time, in seconds since the epoch."""

    moment: float


Start = Last | At | Since
"""Where to start. The words for it are those of kcat."""


def parse_start(text: str, now: float) -> Start:
    """Parse a start.

    Raises:
        UserError: the text is not a start.
    """
    word = text.strip().lower()
    if word in ("beginning", "earliest"):
        return At(0)
    if word in ("latest", "end", "-0"):
        return Last(0)
    if word.startswith("-") and word[1:].isdigit():
        if (count := int(word)) >= -MOST_RECENT:
            return Last(-count)
        raise UserError(
            f"expected at most the last {MOST_RECENT} records, got {text}; name an offset or a time instead"
        )
    # Offsets are signed 64-bit numbers: 18 digits always fit.
    if word.isdigit() and len(word) < 19:
        return At(int(word))
    try:
        return Since(moment(text, now))
    except UserError as error:
        raise UserError(
            f"expected a start such as beginning, latest, -100, an offset, 10m or 2026-01-31T12:00, got {text!r}"
        ) from error


async def first_offsets(start: At | Since, extents: Extents, offsets_since: OffsetsSince) -> dict[TopicPartition, int]:
    """The offset to start at in each partition, within the held offsets."""
    if isinstance(start, At):
        wanted: Mapping[TopicPartition, int] = dict.fromkeys(extents, start.offset)
    else:
        wanted = await offsets_since(extents, start.moment)
    # Starting at an offset that is no longer held would be refused as a loss of records.
    return {tp: min(max(wanted.get(tp, held.end), held.first), held.end) for tp, held in extents.items()}


@dataclass(frozen=True)
class TopicReader:
    """Reads one topic, also through gaps and outages, without decoding. ``partitions`` None: all; ``tell``: prints
    notes.
    """

    bus: Bus
    topic: str
    offsets_since: OffsetsSince
    tell: Callable[[str], None]
    partitions: frozenset[int] | None = None
    client_id: str = "streamrl-tail"

    async def records(self, start: Start, *, follow: bool) -> AsyncGenerator[Record, None]:
        """The existing records, roughly oldest first; with ``follow``, also new ones as they arrive.

        Raises:
            TopicMissing: there is no such topic, or it does not have these partitions.
            BusUnavailable: no broker answers at the start.
        """
        history = BusHistory(self.bus, self.client_id)
        extents = await self._extents(history)
        # The newest records of a topic are at different offsets in each partition.
        if isinstance(start, Last):
            for record in await newest_records(history, self.topic, extents, start.count):
                yield record
            following = {tp: held.end for tp, held in extents.items()}
        else:
            following = await first_offsets(start, extents, self.offsets_since)
            # Only up to the current ends, so that the command ends even if new records arrive quickly.
            if not follow:
                ranges = {tp.partition: Extent(following[tp], held.end) for tp, held in extents.items()}
                async with aclosing(_closable(history.records(self.topic, ranges))) as held_records:
                    async for record in held_records:
                        yield record
        while follow:
            async with aclosing(self._new_records(following)) as new:
                async for record in new:
                    # If this subscription fails, the next one starts here.
                    following[TopicPartition(record.topic, record.partition)] = record.offset + 1
                    yield record
            # After a gap or an outage, a new subscription starts after it.
            await asyncio.sleep(RETRY_S)

    async def _extents(self, history: BusHistory) -> Extents:
        extents = await history.extents(self.topic)
        chosen = {
            tp: held for tp, held in extents.items() if self.partitions is None or tp.partition in self.partitions
        }
        if not chosen:
            if not extents:
                raise TopicMissing(f"expected topic {self.topic}, found none")
            given = ", ".join(map(str, sorted(self.partitions or ())))
            raise TopicMissing(f"expected a partition from 0 to {len(extents) - 1} of topic {self.topic}, got {given}")
        return chosen

    async def _new_records(self, positions: dict[TopicPartition, int]) -> AsyncGenerator[Record, None]:
        """New records from the positions on, until a gap or an outage ends the subscription."""
        try:
            subscription = await self.bus.subscribe(
                [self.topic],
                client_id=self.client_id,
                start=dict(positions),
                partitions=[tp.partition for tp in positions],
            )
        except (DataLossRefused, BusUnavailable) as error:
            self._pass_over(error, positions)
            return
        try:
            while True:
                # Sorted by time within a poll. Across polls, records are not held back to sort them.
                for record in sorted(await subscription.poll(timeout_s=POLL_S), key=lambda each: each.timestamp):
                    yield record
        except (DataLossRefused, BusUnavailable) as error:
            self._pass_over(error, positions)
        finally:
            await subscription.close()

    def _pass_over(self, error: DataLossRefused | BusUnavailable, positions: dict[TopicPartition, int]) -> None:
        if not isinstance(error, DataLossRefused):
            self.tell(f"waiting for the broker: {error}")
            return
        for topic, partition, first, end in error.holes:
            tp = TopicPartition(topic, partition)
            # Offsets start at zero again only if the topic was recreated.
            recreated = positions.get(tp, 0) > first
            positions[tp] = 0 if recreated else end
            event = "it was recreated, reading from its start" if recreated else f"{first} to {end - 1} were deleted"
            self.tell(f"{topic}[{partition}]: {event}")


def _closable(records: AsyncIterator[Record]) -> AsyncGenerator[Record, None]:
    assert isinstance(records, AsyncGenerator), "histories implement it as a generator"
    return records


async def newest_records(history: BusHistory, topic: str, extents: Extents, count: int) -> list[Record]:
    """The newest ``count`` records by time, or all if there are fewer."""
    # Read from near the end, and further back until there are enough: some offsets have no record.
    span = MARKERS_TOO * count
    while count:
        ranges = {tp.partition: Extent(max(held.first, held.end - span), held.end) for tp, held in extents.items()}
        newest = _Newest(count)
        async for record in history.records(topic, ranges):
            newest.add(record)
        reached = all(ranges[tp.partition].first == held.first for tp, held in extents.items())
        if reached or len(newest.held) == count:
            return list(newest.in_order())
        span *= 8
    return []


class _Newest:
    """Keeps the newest few of many records."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.held: list[tuple[float, int, int, Record]] = []

    def add(self, record: Record) -> None:
        # Partition and offset decide between equal times, because records have no order.
        item = (record.timestamp, record.partition, record.offset, record)
        if len(self.held) < self._count:
            heapq.heappush(self.held, item)
        else:
            heapq.heappushpop(self.held, item)

    def in_order(self) -> Iterator[Record]:
        return (item[-1] for item in sorted(self.held))
