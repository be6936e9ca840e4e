"""Audits a run at intervals and reads only new records. It remembers all that it has read, also past retention.

Invariants, each with a test of its name:
- a_followed_audit_equals_a_whole_audit: the report is that of one audit of all records that the follower has read.
  Neither the number of its rounds nor restarts between them matter;
- unread_records_are_reported: records that retention deleted before the follower read them count as expired.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from streamrl.bus.history import Extent, History
from streamrl.bus.port import Record, TopicPartition
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.audit import audited_topics, handlers_of, unreadable
from streamrl.inspection.audit.checks import judge
from streamrl.inspection.audit.report import AuditReport
from streamrl.inspection.audit.settling import settle, unsettle
from streamrl.inspection.audit.state import FollowedRun
from streamrl.inspection.scopes import scopes_of
from streamrl.schemas.errors import DataError, WireError
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, Topic

SEGMENT = 8_000
"""Settled records that are packed together. Until then each round judges them again, which takes 20 ms at most."""


class TopicsRecreated(DataError):
    """The topics are not the ones that were read before."""


@dataclass
class AuditFollower:
    """Follows one run.

    ``known``: the state so far; ``new_records``: records that the last round read; ``lag``: records that are still to
    be read; ``packed``: whether the last round packed settled records.
    """

    history: History
    list_checkpoints: Callable[[], Sequence[CheckpointManifest]]
    known: FollowedRun
    segment: int = SEGMENT
    new_records: int = 0
    lag: int = 0
    packed: bool = False
    _recognised: bool = field(default=False, init=False)
    _scopes: tuple[str, ...] = field(default=(), init=False)
    _control_read: dict[TopicPartition, int] = field(default_factory=dict, init=False)

    async def advance(self) -> AuditReport:
        """Read the new records, and judge all records that were ever read.

        Raises:
            DataError: there is no such run, a record of the steps or skips topic does not decode, or the topics were
                recreated (``TopicsRecreated``), in which case ``known`` is useless.
            BusUnavailable: the topics cannot be read; ``known`` keeps the records read so far.
            DataLossRefused: retention deleted records that were about to be read; the next round counts them.
        """
        began = time.monotonic()
        # In the order of a whole audit: a report or row refers only to records that were written before it.
        manifests, run = list(self.list_checkpoints()), self.known.run
        found = await scopes_of(self.history, run, self._control_read)
        self._scopes = tuple(sorted({*self._scopes, *found}))
        manifests = [each for each in manifests if each.run in (run, *self._scopes)]
        held = await self.history.extents(*audited_topics(run, self._scopes))
        if not any(tp.topic == TRAJECTORIES.full_name(self.known.run) for tp in held):
            raise DataError(
                f"expected the topics of run {self.known.run!r}, found none: check the run's name and the broker's "
                "address"
            )
        if not self._recognised:
            await self._recognise(held)
            self._recognised = True
        for tp, extent in held.items():
            self._note(tp, extent)
        await self._read(held)
        index, settled = self.known.index, self.known.settled
        unsettle(settled, index, manifests)
        judgement = judge(self.known.run, index, manifests, settled)
        self.packed = bool(settle(settled, index, judgement, self.segment))
        return judgement.report.timed(time.monotonic() - began)

    async def _recognise(self, held: Mapping[TopicPartition, Extent]) -> None:
        """Raise if the topics no longer hold the records that were read."""
        wanted = {tp: mark for tp, mark in self.known.marks.items() if tp in held and held[tp].first <= mark[0]}
        for topic in {tp.topic for tp in wanted}:
            positions = [(tp.partition, mark[0]) for tp, mark in wanted.items() if tp.topic == topic]
            found = await self.history.fetch(topic, positions)
            for partition, offset in positions:
                record = found.get((partition, offset))
                if record is None or _checksum(record) != self.known.marks[TopicPartition(topic, partition)][1]:
                    raise TopicsRecreated(_recreated(TopicPartition(topic, partition), offset))

    def _note(self, tp: TopicPartition, extent: Extent) -> None:
        """Note where to continue reading, and which records were deleted unread."""
        index, position = self.known.index, self.known.positions.get(tp)
        if position is not None and extent.end < position:
            raise TopicsRecreated(_recreated(tp, position - 1))
        if tp.topic == self._name_of(TRAJECTORIES):
            index.trajectories.extend(tp.partition, extent)
        if extent.first > (position or 0):
            self._note_unread(tp, position, extent.first)
        self.known.positions[tp] = max(extent.first, position or 0)

    def _note_unread(self, tp: TopicPartition, position: int | None, first: int) -> None:
        """Note that the offsets from ``position`` to ``first`` - 1 were deleted unread. None: nothing was read yet."""
        index = self.known.index
        if tp.topic in self._names_of(STEPS):
            index.steps_begin = False
        elif tp.topic in self._names_of(SKIPS):
            index.skips_begin = False
        elif tp.topic == self._name_of(TRAJECTORIES) and position is not None:
            index.trajectories.note_unread(tp.partition, Extent(position, first))
        if position is not None:
            self.known.since.append(f"{tp.topic}[{tp.partition}]: offsets {position} to {first - 1} deleted unread")

    async def _read(self, held: Mapping[TopicPartition, Extent]) -> None:
        known, handlers = self.known, handlers_of(self.known.run, self.known.index, self._scopes)
        ranges = {tp: Extent(known.positions[tp], extent.end) for tp, extent in held.items()}
        self.lag = sum(extent.end - extent.first for extent in ranges.values())
        self.new_records = 0
        marked = {*self._names_of(STEPS), self._name_of(TRAJECTORIES)}
        first: dict[TopicPartition, int] = {}
        last: dict[TopicPartition, Record] = {}
        try:
            async for record in self.history.within(ranges):
                try:
                    handlers[record.topic](record)
                except WireError as error:
                    raise unreadable(record, error) from error
                tp = TopicPartition(record.topic, record.partition)
                # Updated with each record, so that the round after an interrupted one continues where it stopped.
                known.positions[tp] = record.offset + 1
                self.new_records += 1
                first.setdefault(tp, record.offset)
                if record.topic in marked:
                    last[tp] = record
        finally:
            known.marks |= {tp: (record.offset, _checksum(record)) for tp, record in last.items()}
        await self._note_deleted({tp: extent for tp, extent in ranges.items() if extent.first < extent.end}, first)
        # The offsets of transaction markers are passed without a record.
        known.positions |= {tp: extent.end for tp, extent in held.items()}
        self.lag = 0

    async def _note_deleted(self, ranges: Mapping[TopicPartition, Extent], first: Mapping[TopicPartition, int]) -> None:
        """Note records that retention deleted after the ends were asked for and before they were read."""
        late = {tp: extent for tp, extent in ranges.items() if first.get(tp, extent.end) > extent.first}
        if not late:
            return
        # An offset without a record may also be a transaction marker.
        held = await self.history.extents(*{tp.topic for tp in late})
        for tp, extent in late.items():
            until = min(held[tp].first if tp in held else extent.end, first.get(tp, extent.end))
            if until > extent.first:
                self._note_unread(tp, extent.first, until)

    def _names_of(self, topic: Topic) -> set[str]:
        """The topic's full names in the run and in its attached instances."""
        return {topic.full_name(scope) for scope in (self.known.run, *self._scopes)}

    def _name_of(self, topic: Topic) -> str:
        return topic.full_name(self.known.run)


def _checksum(record: Record) -> bytes:
    return xxhash.xxh3_64_digest(record.value or b"")


def _recreated(tp: TopicPartition, offset: int) -> str:
    return (
        f"expected the record that was read before at {tp.topic}[{tp.partition}]@{offset}, it is not there: the topics "
        "were recreated"
    )
