"""Opens the trajectories topic for a reader: where reading starts after a restore, and whether it is the same topic.

Two things must never pass silently: records that retention deleted before they were read, and a topic that was deleted
and created again, whose offsets mean other records. A setting can accept the first, never the second.

The topic may also be on another cluster: a mirror, or a restored backup, with other offsets. There the checkpoint's
finished offsets mean nothing, but its finished names do. So the topic is read once: the first record of each finished
trajectory is finished there too, and everything else is pending. Invariants, each with a test of its name:
- trajectories_finished_by_name_stay_finished, in any partition, at any offset and in any order;
- missing_finished_records_are_counted: an upper bound of finished records that the topic lacks or that have no name.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from streamrl.bus.history import BusHistory
from streamrl.bus.port import Bus, Record, Subscription, TopicPartition
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.ledger import KnownRecord, Ledger
from streamrl.consumers.ingest.settings import offsets_in
from streamrl.schemas.codec import peek_trajectory_id
from streamrl.schemas.errors import BusUnavailable, DataLossRefused, WireError
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import Trajectory

log = structlog.get_logger()

POLL_S = 0.2
OPEN_ATTEMPTS = 5
"""Attempts to open: retention may delete more records while lost ones are being recorded."""
COMPARE_TIMEOUT_S = 30.0
"""Time-out for reading one known record of each partition: far above what a running broker needs."""

LostRange = tuple[str, int, int, int]
"""Topic, partition, first missing offset, the offset after the last missing one."""


@dataclass(frozen=True)
class TopicOpening:
    """Opens a reader's topic. ``accept_loss``: lost ranges get skip rows instead of ending the trainer."""

    bus: Bus
    topic: str
    client_id: str
    accept_loss: bool

    async def open(self, ledger: Ledger) -> Subscription:
        """A subscription that continues at the frontier's positions; records accepted losses in the ledger.

        Raises:
            DataLossRefused: records that were not trained are missing, or this is another topic.
            BusUnavailable: no broker answers.
        """
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            # Positions equal the low marks at the start; after a loss during reading they are beyond them.
            start = {TopicPartition(self.topic, n): offset for n, offset in ledger.frontier.positions().items()}
            try:
                return await self.bus.subscribe([self.topic], client_id=self.client_id, start=start)
            except DataLossRefused as error:
                lost = await self._lost_ranges(start)
                # If the broker's own offsets show no loss, the refusal has another cause, which must be raised.
                if attempt == OPEN_ATTEMPTS or not lost:
                    raise
                if not self.accept_loss:
                    raise DataLossRefused(_loss_refused(lost), lost) from error
            for _, partition, first, end in lost:
                log.error("records were deleted before they were trained", partition=partition, first=first, end=end)
                ledger.record_loss(partition, first, end)
        raise AssertionError("unreachable: the last attempt raises or returns")

    async def start_at_held_records(self, ledger: Ledger, begin: str = "beginning") -> None:
        """Start the frontier at the oldest records on the topic; those before ``begin`` get one row for each partition.

        Raises:
            BusUnavailable: no broker answers.
        """
        begins, ends = await self._extents()
        ledger.frontier.begin_at({tp.partition: first for tp, first in begins.items()})
        held = {tp.partition: (first, ends[tp]) for tp, first in begins.items()}
        for partition, wanted in first_wanted(begin, held).items():
            if held[partition][0] < wanted:
                ledger.record_start(partition, held[partition][0], wanted)

    async def is_other_topic(self, ledger: Ledger) -> bool:
        """Whether the topic is not the checkpoint's, or may not be.

        Raises:
            BusUnavailable: no broker answers.
        """
        try:
            if await self.check(ledger):
                return False
        except DataLossRefused:
            return True
        # There is nothing to compare. If the next records are missing too, either retention deleted them or the cluster
        # is another one. The user chooses: ``accept_loss`` for the first, ``translate_offsets`` for the second.
        begins, _ = await self._extents()
        lows = {TopicPartition(self.topic, n): low for n, low in ledger.frontier.lows().items() if low}
        return any(low < begins.get(tp, 0) for tp, low in lows.items())

    async def check(self, ledger: Ledger) -> bool:
        """Check that the topic is the checkpoint's; false if there was no known record to compare.

        Raises:
            DataLossRefused: the topic ends before the frontier, or holds other records than before.
            BusUnavailable: no broker answers, or it does not deliver the records to compare.
        """
        known = {TopicPartition(self.topic, n): record for n, record in ledger.known_records.items()}
        lows = {TopicPartition(self.topic, n): low for n, low in ledger.frontier.lows().items() if low}
        if not known and not lows:
            return False
        begins, ends = await self._extents()
        for tp, low in lows.items():
            _must_reach(tp, low, ends)
        for tp, record in known.items():
            _must_reach(tp, record.offset + 1, ends)
        # Known records that retention has deleted since cannot be compared; all others are.
        held = {tp: record for tp, record in known.items() if record.offset >= begins.get(tp, 0)}
        if held:
            await self._compare(held)
        return bool(held)

    async def _extents(self) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]:
        """By partition: the first offset held, and the offset after the last."""
        probe = await self.bus.subscribe([self.topic], client_id=f"{self.client_id}-probe", start="latest")
        try:
            return await probe.beginning_offsets(), await probe.end_offsets()
        finally:
            await probe.close()

    async def _lost_ranges(self, start: Mapping[TopicPartition, int]) -> list[LostRange]:
        begins, ends = await self._extents()
        for tp, offset in start.items():
            _must_reach(tp, offset, ends)
        return [
            (tp.topic, tp.partition, offset, begins[tp])
            for tp, offset in sorted(start.items())
            if offset < begins.get(tp, 0)
        ]

    async def _compare(self, known: Mapping[TopicPartition, KnownRecord]) -> None:
        found = await self._first_records({tp: record.offset for tp, record in known.items()})
        for tp, expected in known.items():
            name = _trajectory_id(found[tp])
            if found[tp].offset != expected.offset or name != expected.trajectory_id:
                wanted = f"trajectory {expected.trajectory_id!r} at offset {expected.offset}"
                raise DataLossRefused(_recreated(tp, wanted, repr(name)))

    async def _first_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, Record]:
        """The first record at or after each offset."""
        reading = await self.bus.subscribe(
            [self.topic],
            client_id=f"{self.client_id}-compare",
            start=offsets,
            partitions=[tp.partition for tp in offsets],
        )
        found: dict[TopicPartition, Record] = {}
        try:
            async with asyncio.timeout(COMPARE_TIMEOUT_S):
                while len(found) < len(offsets):
                    for record in await reading.poll(timeout_s=POLL_S):
                        found.setdefault(TopicPartition(record.topic, record.partition), record)
                    reading.pause(found)  # one record of each is enough; otherwise long partitions fill every poll
        except TimeoutError:
            missing = sorted(offsets.keys() - found.keys())
            raise BusUnavailable(
                f"expected a record of each of {missing} within {COMPARE_TIMEOUT_S:.0f} s, got none; check the broker"
            ) from None
        finally:
            await reading.close()
        return found


def _must_reach(tp: TopicPartition, offset: int, ends: Mapping[TopicPartition, int]) -> None:
    # Retention moves a partition's start, never its end: a partition that ends earlier than before is another one.
    if ends.get(tp, 0) < offset:
        raise DataLossRefused(_recreated(tp, f"{offset} records", f"{ends.get(tp, 0)}"))


def _trajectory_id(record: Record) -> str | None:
    try:
        message = record.message()
    except WireError:
        return None
    return message.trajectory_id if isinstance(message, Trajectory) else None


def _recreated(tp: TopicPartition, expected: str, got: str) -> str:
    return (
        f"expected {expected} in {tp.topic}/{tp.partition}, as the checkpoint says, got {got}: the topic was deleted "
        "and recreated, or this is another broker; restore the topic or name the right broker; for a mirror or backup "
        "with the same trajectories, give --ingest.translate_offsets true; or start a new run from the checkpoint's "
        "model (--model.path) under another name"
    )


def _loss_refused(lost: list[LostRange]) -> str:
    ranges = ", ".join(f"{topic}/{number} offsets {start} to {end - 1}" for topic, number, start, end in lost)
    return (
        f"expected to continue without loss, but retention deleted {ranges} before they were trained; give "
        "--ingest.accept_loss true to continue without them, with a retention_expired row for each range; on another "
        "cluster than the checkpoint's, give --ingest.translate_offsets true instead"
    )


def first_wanted(begin: str, held: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """By partition, the offset of the first record to train.

    ``held``: by partition, the first offset on the topic and the one after the last. A partition that ``begin`` does
    not name starts with its first record.
    """
    match begin:
        case "now":
            return {partition: end for partition, (_, end) in held.items()}
        case "beginning":
            return {partition: first for partition, (first, _) in held.items()}
    wanted = offsets_in(begin)
    return {partition: min(max(wanted.get(partition, first), first), end) for partition, (first, end) in held.items()}


IsFinished = Callable[[str], bool]
"""Whether a checkpoint lists the trajectory of this name as trained or skipped."""


@dataclass
class Translation:
    """A checkpoint's position in the stream, translated to another topic's offsets.

    ``carried``: records of finished trajectories; ``finished_before``: number of offsets finished in the checkpoint.
    """

    is_finished: IsFinished
    finished_before: int = 0
    frontier: Frontier = field(default_factory=Frontier)
    known_records: dict[int, KnownRecord] = field(default_factory=dict)
    carried: list[RecordRef] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    @property
    def absent(self) -> int:
        """Upper bound of finished records not found here; it also counts offsets that never held a named record."""
        return max(0, self.finished_before - len(self.carried))

    def add(self, name: str | None, partition: int, offset: int) -> None:
        """Process the next record. A second copy of a finished trajectory stays pending: the filter skips it."""
        if name is None or name in self._seen or not self.is_finished(name):
            return
        self._seen.add(name)
        self.carried.append(RecordRef(name, partition, offset))
        self.frontier.partition(partition).done.add(offset)
        # Offsets ascend within a partition, so the last record is the highest.
        self.known_records[partition] = KnownRecord(offset=offset, trajectory_id=name)


async def translate(bus: Bus, topic: str, client_id: str, is_finished: IsFinished, before: Frontier) -> Translation:
    """Read the whole topic and find the finished records. ``before``: the frontier in the checkpoint's offsets.

    Raises:
        BusUnavailable: no broker answers, or the topic does not exist.
    """
    found = Translation(is_finished, finished_records(before))
    history = BusHistory(bus, client_id)
    # Records before the first offsets are not here, and must not be waited for.
    found.frontier.begin_at({tp.partition: extent.first for tp, extent in (await history.extents(topic)).items()})
    async with aclosing(_named(history, topic)) as records:
        async for record, name in records:
            found.add(name, record.partition, record.offset)
    return found


def finished_records(frontier: Frontier) -> int:
    """Number of finished offsets of a frontier; it exceeds the records where offsets never held one."""
    return sum(
        found.low + sum(offset >= found.low for offset in found.done) + sum(end - first for first, end in found.passed)
        for found in frontier.partitions.values()
    )


async def _named(history: BusHistory, topic: str) -> AsyncGenerator[tuple[Record, str | None], None]:
    async with aclosing(history.records(topic)) as records:
        async for record in records:
            # The name is read even if the record does not decode: it was finished under that name, or not at all.
            yield record, peek_trajectory_id(record.value, record.headers)
