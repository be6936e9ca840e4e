"""Keeps a run's index up to date with its topics. It only reads: it joins no group and commits nothing.

Invariants, each with a test of its name:
- records_are_read_once: each partition continues at the last record that was read, which shows that it is still the
  same log;
- a_recreated_topic_starts_a_new_index: a log that ends before the index, or has another record at an indexed position,
  is not the log that was indexed.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from streamrl.bus.history import Extent, History
from streamrl.bus.port import Record, TopicPartition
from streamrl.bus.waiting import wait_for_event
from streamrl.observability.record_index.entries import Fold, Rows, mark_of
from streamrl.observability.record_index.store import ReadPosition, RecordIndex
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused, UserError
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES

CHUNK = 4000
"""Records per transaction: some milliseconds of writing, and the most that a killed process has to read again."""
ATTEMPTS = 5
"""Attempts in a row, since another writer, retention or a recreated topic may interfere."""
FOLLOW_EVERY_S = 15.0
"""Seconds between two looks: reading the ends of all partitions costs some hundredths of a second."""
FIRST_FOLLOW_S = 1.0
JUDGING = (STEPS, SKIPS, DEAD_LETTERS, CONTROL, HEARTBEATS)

log = structlog.get_logger()


class _Overtaken(Exception):
    """Another process has moved a read position in the meantime."""


class _OtherLog(Exception):
    """A partition does not hold the records that were indexed."""


@dataclass
class IndexFollower:
    """Keeps ``index`` up to date with a run's topics.

    ``progress``: called with the number of offsets done and the total. ``unread``: offsets that the current
    ``catch_up`` has still to read. ``judging``: full names of the topics that decide the fates of trajectories. They
    have few partitions and records, compared with the others.
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
        """When all topics, or these, were last read to their ends, by the loop's clock; None: some never were."""
        times = [self._caught_up_at.get(topic) for topic in (self._fold.topics if topics is None else topics)]
        known = [at for at in times if at is not None]
        return min(known) if len(known) == len(times) else None

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the index up to date.

        Consumes: the run's topics, from the end of the index on. Produces: rows of the index.
        Waits for: its pace. On failure: tries again at the next turn; a reader of the index catches up on its own.
        On stop: returns at once.
        """
        pause = FIRST_FOLLOW_S
        while not stop.is_set():
            if await wait_for_event(stop, pause):
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
        """Read the records since the last time, on all topics or on these. Of several callers only one reads.

        Raises:
            BusUnavailable: no broker answers.
            UserError: the broker has no topics of the run, or the index cannot be written.
        """
        asked_at = asyncio.get_running_loop().time()
        wanted = self._fold.topics if topics is None else tuple(topics)
        async with self._lock:
            # Another caller has caught up since this call.
            if (caught_up_at := self.caught_up_at(wanted)) is not None and caught_up_at > asked_at:
                return
            for attempt in range(ATTEMPTS):
                started_at = asyncio.get_running_loop().time()
                try:
                    await self._read_on(wanted)
                except (_Overtaken, DataLossRefused) as error:
                    if attempt + 1 == ATTEMPTS:
                        raise BusUnavailable(
                            f"expected to read the run's topics to their ends, got: {error}"
                        ) from error
                except sqlite3.OperationalError as error:
                    raise UserError(
                        f"expected to write {self.index.path}, got: {error}; free disk space, or delete the file"
                    ) from error
                except (_OtherLog, sqlite3.DatabaseError) as error:
                    if attempt + 1 == ATTEMPTS:
                        raise BusError(f"expected topics that do not change under the index, got: {error}") from error
                    log.warning("the index of records is rebuilt", run=self.run_name, because=str(error))
                    self.index.clear()
                    self._caught_up_at.clear()
                    # A new index needs all topics.
                    wanted = self._fold.topics
                else:
                    self._caught_up_at |= dict.fromkeys(wanted, started_at)
                    return
                finally:
                    self.unread = 0

    async def rebuild(self) -> None:
        """Clear the index, and read everything again.

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
                if chunk.note(tp, record) >= CHUNK:
                    chunk.write()
                    self.unread = max(0, total - done)
                    self.progress(done, total)
                    # Other tasks of the event loop get their turn between two transactions.
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
                f"expected the topics of run {self.run_name!r}, found none; check its name and the broker's address"
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
        # Compaction removes a record when a later one has the same key.
        elif record.topic not in self._fold.compacted:
            raise _OtherLog(f"no record at {record.topic}/{record.partition}@{before.anchor}, where one was indexed")


def _wanted(held: Extent, read: ReadPosition | None) -> Extent | None:
    """The offsets to read of a partition, from the last record read before on, which must be there again."""
    following = held.first if read is None else max(held.first, read.next)
    if following >= held.end:
        return None
    if read is not None and read.anchor is not None and held.first <= read.anchor:
        return Extent(read.anchor, held.end)
    return Extent(following, held.end)


class _Chunk:
    """The rows of the records since the last transaction, and the new read positions."""

    def __init__(self, index: RecordIndex, known: dict[TopicPartition, ReadPosition]) -> None:
        self.rows = Rows()
        self._index = index
        self._before = dict(known)
        self._last: dict[TopicPartition, Record] = {}
        self._count = 0

    def note(self, tp: TopicPartition, record: Record) -> int:
        """Note a record whose rows were added; returns the number of records."""
        self._last[tp] = record
        self._count += 1
        return self._count

    def write(self) -> None:
        """Write the rows up to the last record of each partition. Raises _Overtaken."""
        self._write({tp: _progress(record, record.offset + 1) for tp, record in self._last.items()})

    def finish(self, ends: dict[TopicPartition, int]) -> None:
        """Write the rest. ``ends``: up to where each partition was read, with or without records. Raises _Overtaken."""
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
