"""Keeps a run's index up to what its topics hold; reads only, joins no group and commits nothing.

Invariants, each with a test of its name:
- what_was_read_is_not_read_again: a partition goes on at the last record that was read, which shows that it is still
  the same log;
- a_topic_made_anew_begins_a_new_index: a log that ends before the index, or has another record where that one was,
  is not the one that was indexed.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from streamrl.bus.history import Extent, History
from streamrl.bus.port import Record, TopicPartition
from streamrl.bus.waiting import happens_within
from streamrl.observability.record_index.entries import Fold, Rows, mark_of
from streamrl.observability.record_index.store import ReadPosition, RecordIndex
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused, UserError
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES

CHUNK = 4000
"""Records a transaction: some milliseconds of writing, and what is read again at most when a process is killed."""
ATTEMPTS = 5
"""In a row at what others may get in the way of: another writer, retention, a topic made anew."""
FOLLOW_EVERY_S = 15.0
"""Of a run that goes on: to ask for the ends of all partitions costs some hundredths of a second."""
FIRST_FOLLOW_S = 1.0
JUDGING = (STEPS, SKIPS, DEAD_LETTERS, CONTROL, HEARTBEATS)

log = structlog.get_logger()


class _Overtaken(Exception):
    """Another process has read on meanwhile."""


class _OtherLog(Exception):
    """A partition does not hold what was indexed."""


@dataclass
class IndexFollower:
    """``unread``: offsets that the catching up under way has before it. ``progress``: told what is done, of all.

    ``judging``: full names of the topics that say what became of trajectories: a few partitions with few records, where
    the others are many with many.
    """

    history: History
    run_name: str
    index: RecordIndex
    progress: Callable[[int, int], None] = lambda done, total: None
    every_s: Callable[[], float] = lambda: FOLLOW_EVERY_S
    unread: int = 0
    judging: tuple[str, ...] = field(init=False)
    _caught_up_at: dict[str, float] = field(default_factory=dict)
    """When each topic was read to its end, by the event loop's clock."""
    _fold: Fold = field(init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._fold = Fold(self.run_name)
        self.judging = tuple(topic.full_name(self.run_name) for topic in JUDGING)

    def caught_up_at(self, topics: Iterable[str] | None = None) -> float | None:
        """Since when all of them, or of these, may have more than the index has; None: it never had all of some."""
        times = [self._caught_up_at.get(topic) for topic in (self._fold.topics if topics is None else topics)]
        known = [at for at in times if at is not None]
        return min(known) if len(known) == len(times) else None

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the index up to date.

        Consumes: the run's topics, from where the index ends. Produces: rows of the index.
        Waits for: its pace. On failure: tried again at the next turn; whoever needs the index reads what is missing.
        On stop: returns at once.
        """
        pause = FIRST_FOLLOW_S
        while not stop.is_set():
            if await happens_within(stop, pause):
                return
            pause = max(FOLLOW_EVERY_S, self.every_s())
            reading, stopping = asyncio.create_task(self.catch_up()), asyncio.create_task(stop.wait())
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            reading.cancel()
            results = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(error := results[0], Exception):
                log.debug("the index of records is behind", error=str(error))

    async def catch_up(self, topics: Iterable[str] | None = None) -> None:
        """Read what came since the last time, on all topics or on these; of whom several call, one reads.

        Raises:
            BusUnavailable: no broker answers.
            UserError: the run has no topics there.
        """
        asked_at = asyncio.get_running_loop().time()
        wanted = self._fold.topics if topics is None else tuple(topics)
        async with self._lock:
            # Somebody else has caught up since this was asked for.
            if (caught_up_at := self.caught_up_at(wanted)) is not None and caught_up_at > asked_at:
                return
            for attempt in range(ATTEMPTS):
                began = asyncio.get_running_loop().time()
                try:
                    await self._read_on(wanted)
                except (_Overtaken, DataLossRefused) as error:
                    if attempt + 1 == ATTEMPTS:
                        raise BusUnavailable(
                            f"expected to read the run's topics to their ends, got: {error}"
                        ) from error
                except sqlite3.OperationalError as error:
                    raise UserError(
                        f"expected to write {self.index.path}, got: {error}; make room, or delete it"
                    ) from error
                except (_OtherLog, sqlite3.DatabaseError) as error:
                    if attempt + 1 == ATTEMPTS:
                        raise BusError(f"expected topics that stay what they are, got: {error}") from error
                    log.warning("the index of records is begun anew", run=self.run_name, because=str(error))
                    self.index.clear()
                    self._caught_up_at.clear()
                    # What is begun anew is of no use without the records themselves.
                    wanted = self._fold.topics
                else:
                    self._caught_up_at |= dict.fromkeys(wanted, began)
                    return
                finally:
                    self.unread = 0

    async def rebuild(self) -> None:
        """Forget all, and read everything again.

        Raises:
            BusUnavailable: no broker answers.
        """
        self.index.clear()
        self._caught_up_at.clear()
        await self.catch_up()

    async def _read_on(self, topics: Sequence[str]) -> None:
        held = await self.history.extents(*topics)
        known = {tp: read for tp, read in self.index.reading().items() if tp.topic in topics}
        self._refuse_other_logs(topics, known, held)
        ranges = {tp: each for tp, extent in held.items() if (each := _wanted(extent, known.get(tp))) is not None}
        if not ranges:
            return
        chunk = _Chunk(self.index, known)
        anchored = {tp: known[tp] for tp, extent in ranges.items() if tp in known and known[tp].anchor == extent.first}
        total = sum(extent.end - extent.first for extent in ranges.values())
        done = 0
        async with aclosing(self.history.within(ranges)) as records:
            async for record in records:
                tp = TopicPartition(record.topic, record.partition)
                done += 1
                if (before := anchored.pop(tp, None)) is not None:
                    self._refuse_other_record(record, before)
                if tp in known and record.offset < known[tp].next:
                    continue
                self._fold.add(record, chunk.rows)
                if chunk.took(tp, record) >= CHUNK:
                    chunk.write()
                    self.unread = max(0, total - done)
                    self.progress(done, total)
                    # Whoever shares the loop gets its turn between two transactions.
                    await asyncio.sleep(0)
        if lost := [tp for tp in anchored if tp.topic not in self._fold.compacted]:
            raise _OtherLog(f"{lost[0].topic}/{lost[0].partition} has no record at {anchored[lost[0]].anchor}")
        chunk.finish({tp: extent.end for tp, extent in ranges.items()})
        self.progress(total, total)

    def _refuse_other_logs(
        self, topics: Sequence[str], known: dict[TopicPartition, ReadPosition], held: dict[TopicPartition, Extent]
    ) -> None:
        trajectories = TRAJECTORIES.full_name(self.run_name)
        if trajectories in topics and not any(tp.topic == trajectories for tp in held):
            raise UserError(
                f"expected the topics of run {self.run_name!r}, found none: check its name and the broker's address"
            )
        for tp, read in known.items():
            if tp not in held:
                raise _OtherLog(f"{tp.topic}/{tp.partition} is gone")
            if held[tp].end < read.next:
                raise _OtherLog(f"{tp.topic}/{tp.partition} ends at {held[tp].end}, it was read up to {read.next}")

    def _refuse_other_record(self, record: Record, before: ReadPosition) -> None:
        if record.offset == before.anchor:
            if mark_of(record) != before.mark:
                raise _OtherLog(f"another record at {record.topic}/{record.partition}@{record.offset} than was indexed")
        # Compaction takes away what a later record of its key has replaced.
        elif record.topic not in self._fold.compacted:
            raise _OtherLog(f"no record at {record.topic}/{record.partition}@{before.anchor}, where one was indexed")


def _wanted(held: Extent, read: ReadPosition | None) -> Extent | None:
    """What is to be read of a partition: from the last record that was read on, so that it shows itself again."""
    following = held.first if read is None else max(held.first, read.next)
    if following >= held.end:
        return None
    if read is not None and read.anchor is not None and held.first <= read.anchor:
        return Extent(read.anchor, held.end)
    return Extent(following, held.end)


class _Chunk:
    """Rows of the records since the last transaction, and how far they reach."""

    def __init__(self, index: RecordIndex, known: dict[TopicPartition, ReadPosition]) -> None:
        self.rows = Rows()
        self._index = index
        self._before = dict(known)
        self._last: dict[TopicPartition, Record] = {}
        self._count = 0

    def took(self, tp: TopicPartition, record: Record) -> int:
        """Note that the record's rows are in; how many records there are."""
        self._last[tp] = record
        self._count += 1
        return self._count

    def write(self) -> None:
        """Raises _Overtaken."""
        self._write({tp: _progress(record, record.offset + 1) for tp, record in self._last.items()})

    def finish(self, ends: dict[TopicPartition, int]) -> None:
        """Write the rest; partitions were read to these ends, also where no record stands last. Raises _Overtaken."""
        after = {}
        for tp, end in ends.items():
            if (record := self._last.get(tp)) is not None:
                after[tp] = _progress(record, end)
            elif (before := self._before.get(tp)) is not None:
                after[tp] = before._replace(next=max(end, before.next))
            else:
                after[tp] = ReadPosition(end)
        self._write(after)

    def _write(self, after: dict[TopicPartition, ReadPosition]) -> None:
        if not self._index.add(self.rows, self._before, after):
            raise _Overtaken("another process reads the run into the same index")
        self._before |= after
        self.rows, self._last, self._count = Rows(), {}, 0


def _progress(record: Record, end: int) -> ReadPosition:
    return ReadPosition(end, record.offset, mark_of(record))
