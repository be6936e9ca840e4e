"""A trajectory's history, or a group's state, from the topics. The index gives the positions of the records to read.

The records of each topic become events, sorted by time. The times are from several clocks (dispatcher, worker, broker,
trainer), so events of two processes that are close in time may be in the wrong order. Undone steps and skip rows are
shown, but do not decide the fate. Those of another cluster are not shown, because its positions do not apply to this
one.

Invariant the_index_is_never_trusted: a record counts only if it has the name that the index has for it. If a record
does not, the index is rebuilt.
"""

import asyncio
import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from streamrl.bus.history import History
from streamrl.bus.port import Position, Record, message_of
from streamrl.inspection.replay.events import (
    HistoryEvent,
    StepMessage,
    dead_letter_event,
    in_order,
    order_event,
    place_of,
    skip_event,
    step_events,
    worker_events,
)
from streamrl.inspection.replay.steps import Lineages
from streamrl.observability.record_index.entries import Kind, RefKind, joined_name, split_name
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import Place, RecordIndex
from streamrl.schemas.codec import peek_trajectory_id
from streamrl.schemas.errors import UserError, WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import CarriedOver, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import Trajectory, WorkOrder

PENDING, ELSEWHERE = "pending", "finished on another cluster"
POSITION = re.compile(r"(\d{1,9})@(\d{1,18})")
FRESH_S = 1.0
"""Seconds for which an index counts as up to date when a fate may have changed."""
MOST_SAMPLES = 512
"""Samples of a group that are read; the others are only counted."""
MOST_NAMES = 5
"""Names that an error lists."""
TOPIC_OF = {Kind.TRAJECTORY: TRAJECTORIES, Kind.ORDER: WORK_ORDERS, Kind.STEP: STEPS, Kind.SKIP: SKIPS}


class _Contradicted(Exception):
    """A record differs from the index."""


@dataclass(frozen=True)
class TrajectoryRecord:
    """A record of the trajectory. ``fate``, by surviving lineages: trained, skipped, pending, left over, elsewhere.

    ``advantage``: in the step that trained it; None: it was not trained, or an older trainer reported the step.
    """

    partition: int
    offset: int
    appended_at: float
    fate: str
    advantage: float | None = None


@dataclass(frozen=True)
class TrajectoryHistory:
    """``trajectory``: from the first of its records. ``settled``: no further event can be expected."""

    trajectory: Trajectory
    records: tuple[TrajectoryRecord, ...]
    events: tuple[HistoryEvent, ...]
    settled: bool = True

    @property
    def advantage(self) -> float | None:
        """The advantage that it was trained with; None if it was not trained, or its step's report does not say."""
        return next((record.advantage for record in self.records if record.advantage is not None), None)


@dataclass(frozen=True)
class GroupSample:
    """A sample of a group; ``trajectory`` None: its record does not decode."""

    trajectory_id: str
    record: TrajectoryRecord
    trajectory: Trajectory | None


@dataclass(frozen=True)
class GroupHistory:
    """``samples``: by index, with every record of a sample that is on the topic more than once. ``awaited``: samples
    that are ordered, but not on the topic yet. ``unread``: number of records that are not shown.
    """

    group_id: str
    samples: tuple[GroupSample, ...]
    awaited: tuple[str, ...]
    orders: tuple[WorkOrder, ...]
    unread: int = 0
    settled: bool = True


@dataclass(frozen=True)
class _Judged:
    """Fates, advantages and events of some records from the trainer's topics, and the newest version trained on any of
    them.
    """

    fates: dict[tuple[int, int], str]
    advantages: dict[tuple[int, int], float]
    events: list[HistoryEvent]
    trained: PolicyVersion | None


@dataclass
class HistoryReader:
    """Reads histories of one run's trajectories, for one algorithm."""

    follower: IndexFollower
    algorithm: str
    _history: History = field(init=False)
    _index: RecordIndex = field(init=False)
    _run: str = field(init=False)

    def __post_init__(self) -> None:
        self._history, self._index, self._run = self.follower.history, self.follower.index, self.follower.run_name

    async def trace(self, name: str) -> TrajectoryHistory:
        """The history of a trajectory, by id or ``partition@offset``.

        Raises:
            UserError: there is no such trajectory, or its record is deleted or does not decode.
        """
        found = await self.look_up(name)
        if isinstance(found, GroupHistory):
            samples = ", ".join(sample.trajectory_id for sample in found.samples[:MOST_NAMES])
            raise UserError(f"expected a trajectory, got the group {name}; its samples are {samples}")
        return found

    async def look_up(self, name: str) -> TrajectoryHistory | GroupHistory:
        """The history of a trajectory, by id or ``partition@offset``, or the state of a group's samples.

        Raises:
            UserError: there is no such trajectory or group, or its record is deleted or does not decode.
            BusUnavailable: the topics cannot be read.
        """
        clock = asyncio.get_running_loop().time
        asked_at, is_new = clock(), False
        if (match := POSITION.fullmatch(name)) is not None:
            name = await self._name_at(int(match[1]), int(match[2]))
        while True:
            try:
                found = await self._found(name)
            except (_Contradicted, sqlite3.DatabaseError) as error:
                if is_new:
                    raise UserError(f"expected records at their indexed positions, got: {error}; try again") from error
                is_new = True
                await self.follower.rebuild()
                continue
            # A missing record may have been written just now. A fate may be a moment old, and is on few topics.
            is_whole = found is not None and not (isinstance(found, GroupHistory) and found.awaited)
            topics = self.follower.judging if is_whole else None
            caught_up_at = self.follower.caught_up_at(topics)
            is_late = caught_up_at is None or caught_up_at < asked_at - (0.0 if found is None else FRESH_S)
            if is_late and (found is None or not found.settled):
                await self.follower.catch_up(topics)
                continue
            if found is None:
                raise UserError(await self._not_there(name))
            return found

    async def _name_at(self, partition: int, offset: int) -> str:
        topic = TRAJECTORIES.full_name(self._run)
        position = Position(topic, partition, offset)
        record = (await self._history.fetch_all([position])).get(position)
        if record is None:
            raise UserError(await self._nothing_at(topic, partition, offset))
        return self._readable(record).trajectory_id

    async def _nothing_at(self, topic: str, partition: int, offset: int) -> str:
        extents = await self._history.extents(topic)
        held = next((extent for tp, extent in extents.items() if tp.partition == partition), None)
        why = "there is no such partition" if held is None else f"it holds offsets {held.first} to {held.end - 1}"
        return f"expected a record at {topic}[{partition}]@{offset}, found none: {why}"

    async def _found(self, name: str) -> TrajectoryHistory | GroupHistory | None:
        group, sample = split_name(name)
        if places := self._index.places(group, Kind.TRAJECTORY, sample):
            return await self._trajectory(group, places)
        if places := self._index.places(name, Kind.TRAJECTORY):
            return await self._group(name, places)
        return None

    async def _not_there(self, name: str) -> str:
        """Why nothing of this name can be shown, according to the index."""
        if groups := self._index.groups_under(name, MOST_NAMES):
            return f"expected a trajectory or a group, got {name!r}, whose groups are {', '.join(groups)}; name one"
        group, sample = split_name(name)
        for each, index in ((group, sample), (name, None)):
            orders = await self._orders(each, index)
            if orders:
                last = orders[-1]
                when = datetime.fromtimestamp(last.created_at, UTC).strftime("%H:%M:%S")
                return (
                    f"expected a finished trajectory, got {name!r}, which was ordered from {last.worker_id} at "
                    f"{when} UTC (attempt {last.attempt}) but is not on the topic yet"
                )
        return (
            f"expected a trajectory id, a group id or partition@offset on {TRAJECTORIES.full_name(self._run)}, got "
            f"{name!r}, which is not there; ids are <prompt id>/<pass>/<sample>, and "
            "`streamrl replay --run RUN --step N` lists those of a step"
        )

    async def _orders(self, group: str, sample: int | None) -> list[WorkOrder]:
        places = self._positions(Kind.ORDER, self._index.places(group, Kind.ORDER))
        return _orders_in(await self._history.fetch_all(places), places, group, sample)

    def _positions(self, kind: Kind, places: Iterable[Place]) -> list[Position]:
        topic = TOPIC_OF[kind].full_name(self._run)
        return [Position(topic, place.partition, place.offset) for place in places]

    async def _trajectory(self, group: str, places: list[Place]) -> TrajectoryHistory:
        sample = places[0].sample
        name = joined_name(group, sample)
        own = self._positions(Kind.TRAJECTORY, places)
        orders = self._positions(Kind.ORDER, self._index.places(group, Kind.ORDER))
        letters, judging = self._letters(places), self._judging(group, sample, places)
        records = await self._history.fetch_all({*own, *orders, *letters, *judging})
        found = [self._verified(records[position], name) for position in own if position in records]
        if not found:
            raise UserError(await self._lost(name, own))
        trajectory = self._readable(found[0])
        events = [order_event(order) for order in _orders_in(records, orders, group, sample)] + worker_events(
            trajectory
        )
        events += [HistoryEvent(record.timestamp, "appended", place_of(record)) for record in found]
        events += [dead_letter_event(records[each]) for each in letters if each in records]
        # A trajectory may be on the topic more than once, and each record has a fate of its own.
        judged = self._judged({(record.partition, record.offset) for record in found}, group, records, judging)
        weights = [] if judged.trained is None else self._weights(judged.trained)
        seen = tuple(_seen(record, judged) for record in found)
        is_open = any(each.fate == PENDING for each in seen) or (
            judged.trained is not None and len(weights) < 2 and not self._index.is_finished(self.algorithm)
        )
        return TrajectoryHistory(trajectory, seen, in_order([*events, *judged.events, *weights]), not is_open)

    async def _group(self, group: str, places: list[Place]) -> GroupHistory:
        shown = places[:MOST_SAMPLES]
        own = self._positions(Kind.TRAJECTORY, shown)
        orders = self._positions(Kind.ORDER, self._index.places(group, Kind.ORDER))
        judging = self._judging(group, None, shown)
        records = await self._history.fetch_all({*own, *orders, *judging})
        found = [
            self._verified(records[position], joined_name(group, place.sample))
            for position, place in zip(own, shown, strict=True)
            if position in records
        ]
        if not found:
            raise UserError(await self._lost(group, own))
        judged = self._judged({(record.partition, record.offset) for record in found}, group, records, judging)
        samples = tuple(
            GroupSample(
                peek_trajectory_id(record.value, record.headers) or group,
                _seen(record, judged),
                _trajectory_in(record),
            )
            for record in found
        )
        ordered = _orders_in(records, orders, group, None)
        wanted = {joined_name(group, index) for order in ordered for index in order.sample_indices}
        there = {joined_name(group, place.sample) for place in places}
        awaited = tuple(sorted(wanted - there, key=lambda name: split_name(name)[1]))
        is_open = bool(awaited) or any(sample.record.fate == PENDING for sample in samples)
        return GroupHistory(group, samples, awaited, tuple(ordered), len(places) - len(shown), not is_open)

    def _verified(self, record: Record, name: str) -> Record:
        if (found := peek_trajectory_id(record.value, record.headers)) != name:
            raise _Contradicted(f"{place_of(record)} holds {found or 'no trajectory'}, but was indexed as {name}")
        return record

    async def _lost(self, name: str, positions: list[Position]) -> str:
        """Why none of these records is there. Raises _Contradicted: the topic should hold at least one of them."""
        held = await self._history.extents(TRAJECTORIES.full_name(self._run))
        for topic, partition, offset in positions:
            extent = next((each for tp, each in held.items() if tp.partition == partition), None)
            if extent is None or offset >= extent.first:
                raise _Contradicted(f"{name} was indexed at {topic}[{partition}]@{offset}, where no record is")
        last = positions[-1]
        return (
            f"expected {name} at {last.topic}[{last.partition}]@{last.offset}, found none: retention has deleted it; "
            "read an older export with --export DIR"
        )

    def _readable(self, record: Record) -> Trajectory:
        try:
            return _decoded(record)
        except UserError as error:
            letters = self._index.refs(RefKind.DEAD_LETTER, [(record.partition, record.offset)])
            if not letters:
                raise
            raise UserError(
                f"{error}; `streamrl dlq show {letters[-1].offset} --run RUN` shows why it was refused"
            ) from error

    def _letters(self, places: list[Place]) -> list[Position]:
        found = self._index.refs(RefKind.DEAD_LETTER, ((place.partition, place.offset) for place in places))
        return [Position(DEAD_LETTERS.full_name(self._run), row.partition, row.offset) for row in found]

    def _judging(self, group: str, sample: int | None, places: list[Place]) -> list[Position]:
        """Positions of the trainer's reports and rows about these records."""
        unnamed = self._index.refs(RefKind.UNNAMED_SKIP, ((place.partition, place.offset) for place in places))
        skips = [
            *self._index.places(group, Kind.SKIP, sample),
            *(Place(0, row.partition, row.offset) for row in unnamed),
        ]
        return [
            *self._positions(Kind.STEP, self._index.places(group, Kind.STEP)),
            *self._positions(Kind.SKIP, skips),
        ]

    def _judged(
        self, positions: set[tuple[int, int]], group: str, records: Mapping[Position, Record], judging: list[Position]
    ) -> _Judged:
        lineages = Lineages.of(self._index.first_reports(self.algorithm), self._index.last_steps(self.algorithm))
        there = [records[position] for position in sorted(set(judging)) if position in records]
        fates, events, trained = dict.fromkeys(positions, PENDING), list[HistoryEvent](), None
        advantages: dict[tuple[int, int], float] = {}
        for record, report in self._reports(there, group, lineages.begin):
            for position, event in step_events(lineages, record, report, positions):
                events.append(event)
                if isinstance(report, CarriedOver):
                    fates[position] = ELSEWHERE if report.lineage == lineages.begin else fates[position]
                elif event.what == "trained" and lineages.counts(report.version):
                    fates[position], trained = f"trained in step {report.step}", report.version
            if isinstance(report, StepReport) and lineages.counts(report.version):
                advantages |= {place: value for place, value in report.advantage_of.items() if place in positions}
        for row in self._rows(there, positions, lineages.begin):
            counts = lineages.counts_row(row)
            events.append(skip_event(row, counts=counts))
            if counts:
                fates[row.partition, row.offset] = f"skipped: {row.reason.value}"
        # After the last step of a finished run, no pending record will be trained.
        if self._index.is_finished(self.algorithm):
            fates |= {position: "left over: the run is finished" for position, fate in fates.items() if fate == PENDING}
        return _Judged(fates, advantages, events, trained)

    def _reports(self, records: Iterable[Record], group: str, begin: int) -> list[tuple[Record, StepMessage]]:
        """The group's reports among the records. A repeated report counts once, by its version."""
        found: list[tuple[Record, StepMessage]] = []
        known: set[tuple[int, int]] = set()
        for record in records:
            if record.topic != STEPS.full_name(self._run):
                continue
            message = message_of(record)
            if not isinstance(message, StepReport | RefusedStep | CarriedOver):
                raise _Contradicted(f"{place_of(record)} holds no step report, but was indexed as one of {group}")
            # Negative numbers for the parts of a lineage, so that they differ from steps.
            version = (message.lineage, -1 - message.part) if isinstance(message, CarriedOver) else message.version
            if message.algorithm != self.algorithm or version in known or version[0] < begin:
                continue
            # Refused attempts have no version of their own.
            known |= set() if isinstance(message, RefusedStep) else {version}
            found.append((record, message))
        return found

    def _rows(self, records: Iterable[Record], positions: set[tuple[int, int]], begin: int) -> list[SkipRecord]:
        """The skip rows about these positions among the records. A repeated row counts once, by its number."""
        rows = {}
        for record in records:
            if record.topic != SKIPS.full_name(self._run):
                continue
            message = message_of(record)
            if not isinstance(message, SkipRecord):
                raise _Contradicted(f"{place_of(record)} holds no skip row, but was indexed as one")
            is_here = message.lineage >= begin and (message.partition, message.offset) in positions
            if message.algorithm == self.algorithm and is_here:
                rows[message.lineage, message.sequence, message.partition, message.offset] = message
        return list(rows.values())

    def _weights(self, version: PolicyVersion) -> list[HistoryEvent]:
        """The events at which weights from this version on were announced and first used."""
        # Versions sort by lineage first, so those after a restart count as newer, for any step.
        events = []
        if (announced := self._index.first_weights(version, in_use=False)) is not None:
            found = PolicyVersion(announced.lineage, announced.number)
            later = "" if found == version else ", which contains it"
            events.append(HistoryEvent(announced.sent_at, "weights announced", f"version {found}{later}"))
        if (used := self._index.first_weights(version, in_use=True)) is not None:
            found = PolicyVersion(used.lineage, used.number)
            later = "" if found == version else f" (already {found})"
            events.append(HistoryEvent(used.sent_at, "weights in use", f"first seen on worker {used.worker}{later}"))
        return events


def _seen(record: Record, judged: _Judged) -> TrajectoryRecord:
    position = (record.partition, record.offset)
    return TrajectoryRecord(*position, record.timestamp, judged.fates[position], judged.advantages.get(position))


def _orders_in(
    records: Mapping[Position, Record], positions: Iterable[Position], group: str, sample: int | None
) -> list[WorkOrder]:
    """The orders of a group, or of one sample of it, oldest first, as far as retention has kept them.

    Raises:
        _Contradicted: another record is at one of the positions.
    """
    found = []
    for record in (records[position] for position in positions if position in records):
        if record.key != group:
            raise _Contradicted(f"{place_of(record)} has the key {record.key!r}, it was indexed as an order of {group}")
        message = message_of(record)
        if isinstance(message, WorkOrder) and message.group_id == group and sample in (None, *message.sample_indices):
            found.append(message)
    return sorted(found, key=lambda order: order.created_at)


def _trajectory_in(record: Record) -> Trajectory | None:
    try:
        return _decoded(record)
    except UserError:
        return None


def _decoded(record: Record) -> Trajectory:
    where = place_of(record)
    try:
        message = record.message()
    except WireError as error:
        raise UserError(
            f"expected a trajectory at {where}, got bytes that do not decode: {error}; see "
            "`streamrl replay --run RUN --from-dlq`"
        ) from error
    if not isinstance(message, Trajectory):
        raise UserError(f"expected a trajectory at {where}, got a {message.SCHEMA}")
    return message
