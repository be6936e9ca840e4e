"""A trajectory's history, collected from the topics: ordered, generated, appended, trained or skipped, weights in use.

What each topic says becomes events, sorted by their times. Those are of several clocks (dispatcher, worker, broker,
trainer), so that near events of two processes may come in the wrong order. Steps and skip rows that a crash undid are
shown, and do not decide the fate.
"""

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, replace

from bus.history import Extent, History
from bus.port import Record
from inspection.audit.index import trajectory_id_of
from inspection.replay.steps import StepLog
from schemas.control import WeightsReady
from schemas.errors import UserError, WireError
from schemas.identifiers import PolicyVersion
from schemas.messages import Message
from schemas.reports import Heartbeat, RecordRef, RefusedStep, SkipRecord, StepReport
from schemas.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from schemas.trajectories import Trajectory, WorkOrder

PENDING = "pending"
POSITION = re.compile(r"(\d+)@(\d+)")


@dataclass(frozen=True)
class HistoryEvent:
    """Something that happened: when (seconds since the epoch), and the seconds since the event before."""

    at: float
    what: str
    detail: str
    since: float | None = None


@dataclass(frozen=True)
class TrajectoryRecord:
    """A record of the trajectory. ``fate``: trained, skipped, pending, or left over, in the surviving chain."""

    partition: int
    offset: int
    appended_at: float
    fate: str


@dataclass(frozen=True)
class TrajectoryHistory:
    """``trajectory``: as in the first of its records."""

    trajectory: Trajectory
    records: tuple[TrajectoryRecord, ...]
    events: tuple[HistoryEvent, ...]


@dataclass(frozen=True)
class HistoryReader:
    """Reads the topics of one run, for one algorithm."""

    history: History
    run: str
    algorithm: str

    async def trace(self, name: str) -> TrajectoryHistory:
        """The history of a trajectory, by id or as ``partition@offset``.

        Raises:
            UserError: there is none, or its record is gone or does not decode.
        """
        found = await self._found(name)
        trajectory = found[0][1]
        # A trajectory may stand on the topic more than once, and each record has a fate of its own.
        positions = {(record.partition, record.offset): record for record, _ in found}
        events = [order_event(order) for order in await self._orders(trajectory)] + worker_events(trajectory)
        events += [HistoryEvent(record.timestamp, "appended", _where(record)) for record, _ in found]
        fates = dict.fromkeys(positions, PENDING)
        reported, trained = await self._trainer_events(fates)
        events += reported + (await self._weights(trained) if trained is not None else [])
        records = tuple(
            TrajectoryRecord(*position, record.timestamp, fates[position]) for position, record in positions.items()
        )
        return TrajectoryHistory(trajectory, records, in_order(events))

    async def _trainer_events(
        self, fates: dict[tuple[int, int], str]
    ) -> tuple[list[HistoryEvent], PolicyVersion | None]:
        """Events of steps and skips, and the version that was trained on it; sets ``fates`` of its records."""
        # All reports before any of them is judged: that a step was undone is told by a later lineage's first report.
        log, steps = await self._steps()
        events: list[HistoryEvent] = []
        trained: PolicyVersion | None = None
        for record, report in steps:
            for position, event in _in_step(log, record, report, set(fates)):
                events.append(event)
                if event.what == "trained" and log.counts(report.version):
                    fates[position], trained = f"trained in step {report.step}", report.version
        for row in await self._skips(set(fates)):
            counts = log.counts_row(row)
            events.append(skip_event(row, counts=counts))
            if counts:
                fates[row.partition, row.offset] = f"skipped: {row.reason.value}"
        reports = [report for _, report in steps if isinstance(report, StepReport)]
        # After the last step of a finished run nobody will train what is pending.
        if reports and reports[-1].finished:
            fates |= {position: "left over: the run is finished" for position, fate in fates.items() if fate == PENDING}
        return events, trained

    async def _found(self, name: str) -> list[tuple[Record, Trajectory]]:
        """Its records, first one first."""
        topic = TRAJECTORIES.full_name(self.run)
        if (match := POSITION.fullmatch(name)) is not None:
            partition, offset = int(match[1]), int(match[2])
            record = (await self.history.fetch(topic, [(partition, offset)])).get((partition, offset))
            if record is None:
                raise UserError(await self._nothing_at(topic, partition, offset))
            name = _decoded(record).trajectory_id
            return [(record, _decoded(record))] + [
                pair for pair in await self._scanned(topic, name, partition) if pair[0].offset != offset
            ]
        found = await self._scanned(topic, name, None)
        if not found:
            raise UserError(
                f"expected a trajectory id or partition@offset on {topic}, got {name!r}, which is not there; ids are "
                "<prompt id>/<pass>/<sample>, and `streamrl replay RUN --step N` lists those of a step"
            )
        return found

    async def _scanned(self, topic: str, name: str, partition: int | None) -> list[tuple[Record, Trajectory]]:
        # An end beyond every log: reading stops where the partition ends. Only ids are read of what does not match.
        ranges = None if partition is None else {partition: Extent(0, 1 << 62)}
        return [
            (record, _decoded(record))
            async for record in self.history.records(topic, ranges)
            if trajectory_id_of(record) == name
        ]

    async def _nothing_at(self, topic: str, partition: int, offset: int) -> str:
        extents = await self.history.extents(topic)
        held = next((extent for tp, extent in extents.items() if tp.partition == partition), None)
        there = "no such partition" if held is None else f"it holds offsets {held.first} to {held.end - 1}"
        return f"expected a record at {topic}[{partition}]@{offset}, got none: {there}"

    async def _steps(self) -> tuple[StepLog, list[tuple[Record, StepReport | RefusedStep]]]:
        log, found = StepLog(), []
        async for record, message in self._messages(STEPS):
            if isinstance(message, StepReport | RefusedStep) and message.algorithm == self.algorithm:
                # A report that was sent again is the same step; refused attempts have no version of their own.
                known = isinstance(message, StepReport) and message.version in log.reports
                log.observe(message)
                found += [] if known else [(record, message)]
        return log, found

    async def _orders(self, trajectory: Trajectory) -> list[WorkOrder]:
        return [
            message
            async for _, message in self._messages(WORK_ORDERS, key=trajectory.group_id)
            if isinstance(message, WorkOrder)
            and message.group_id == trajectory.group_id
            and trajectory.sample_index in message.sample_indices
        ]

    async def _skips(self, positions: set[tuple[int, int]]) -> list[SkipRecord]:
        # A row that was sent again keeps its number, and is one event.
        rows = {
            (message.lineage, message.sequence, message.partition, message.offset): message
            async for _, message in self._messages(SKIPS)
            if isinstance(message, SkipRecord)
            and message.algorithm == self.algorithm
            and (message.partition, message.offset) in positions
        }
        return list(rows.values())

    async def _weights(self, version: PolicyVersion) -> list[HistoryEvent]:
        """When weights that contain it were announced, and first used."""
        # Versions sort by lineage first, so that those after a resumption count as newer, whatever their step.
        announced = [
            message
            async for _, message in self._messages(CONTROL)
            if isinstance(message, WeightsReady) and message.version >= version
        ]
        beats = [
            message
            async for _, message in self._messages(HEARTBEATS)
            if isinstance(message, Heartbeat) and message.version >= version
        ]
        # The first that is left: control is compacted and heartbeats expire, so it may be of later weights already.
        return [announcement_event(message, version) for message in announced[:1]] + [
            adoption_event(message, version) for message in beats[:1]
        ]

    async def _messages(self, topic: Topic, key: str | None = None) -> AsyncIterator[tuple[Record, Message]]:
        async for record in self.history.records(topic.full_name(self.run)):
            # Sorted out by key before it is decoded, which is what costs.
            if key is not None and record.key != key:
                continue
            try:
                yield record, record.message()
            except WireError:
                # What cannot be read tells nothing of this trajectory; the rest of its history can still be shown.
                continue


def in_order(events: Iterable[HistoryEvent]) -> tuple[HistoryEvent, ...]:
    """By time, each with the seconds since the one before."""
    # Stable: events of one time stay in the order in which they were collected, causes before effects.
    ordered = sorted(events, key=lambda event: event.at)
    return tuple(
        replace(event, since=None if number == 0 else event.at - ordered[number - 1].at)
        for number, event in enumerate(ordered)
    )


def order_event(order: WorkOrder) -> HistoryEvent:
    """The dispatcher orders it from a worker."""
    estimate = order.estimate
    return HistoryEvent(
        order.created_at,
        "ordered",
        f"worker {order.worker_id}, attempt {order.attempt}, prompt position {order.position}, estimated "
        f"{estimate.median} tokens (upper {estimate.upper}, bucket {estimate.bucket}, by {estimate.predictor}), "
        f"admitted at {order.admitted_version}",
    )


def worker_events(trajectory: Trajectory) -> list[HistoryEvent]:
    """Generation, by the trajectory itself."""
    tokens, seconds = len(trajectory.token_ids), trajectory.finished_at - trajectory.started_at
    rate = f", {tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
    return [
        HistoryEvent(trajectory.started_at, "started", f"worker {trajectory.worker_id}, attempt {trajectory.attempt}"),
        HistoryEvent(
            trajectory.finished_at,
            "finished",
            f"{tokens} tokens (predicted {trajectory.predicted_length}), {trajectory.finish_reason.value}{rate}",
        ),
    ]


def skip_event(row: SkipRecord, *, counts: bool) -> HistoryEvent:
    """The trainer skips it."""
    undone = "" if counts else "; undone by a crash"
    return HistoryEvent(
        row.sent_at, "skipped", f"{row.reason.value} at step {row.step}: {row.detail or 'no detail'}{undone}"
    )


def announcement_event(message: WeightsReady, version: PolicyVersion) -> HistoryEvent:
    """The coordinator announces weights that were trained on it."""
    later = "" if message.version == version else ", which contains it"
    return HistoryEvent(message.sent_at, "weights announced", f"version {message.version}{later}")


def adoption_event(beat: Heartbeat, version: PolicyVersion) -> HistoryEvent:
    """The first heartbeat of a worker with these weights or newer ones."""
    later = "" if beat.version == version else f" (already {beat.version})"
    return HistoryEvent(beat.sent_at, "weights in use", f"first seen on worker {beat.worker_id}{later}")


def _decoded(record: Record) -> Trajectory:
    where = _where(record)
    try:
        message = record.message()
    except WireError as error:
        raise UserError(
            f"expected a trajectory at {where}, got bytes that do not decode: {error}; see `streamrl replay --from-dlq`"
        ) from error
    if not isinstance(message, Trajectory):
        raise UserError(f"expected a trajectory at {where}, got a {message.SCHEMA}")
    return message


def _in_step(
    log: StepLog, record: Record, report: StepReport | RefusedStep, positions: set[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], HistoryEvent]]:
    """What this report says of the records at these positions."""
    # A refused gradient changed no weights: there is nothing of it that a crash could have undone.
    counts = isinstance(report, StepReport) and log.counts(report.version)
    undone = "" if counts or isinstance(report, RefusedStep) else "; undone by a crash"
    for number, batch in enumerate(report.micro_batches, 1):
        for row, ref in enumerate(batch, 1):
            if (position := _position(ref)) in positions:
                micro_batch = f"micro-batch {number} of {len(report.micro_batches)}"
                where = f"step {report.step}, {micro_batch}, row {row} of {len(batch)}"
                if isinstance(report, RefusedStep):
                    yield position, HistoryEvent(report.sent_at, "gradient refused", f"{where}: {report.problem}")
                    continue
                yield position, HistoryEvent(report.sent_at, "trained", f"{where}, weights {report.version}{undone}")
                yield position, HistoryEvent(record.timestamp, "reported", _where(record))
    for ref in report.left_out:
        if (position := _position(ref)) in positions:
            yield (
                position,
                HistoryEvent(report.sent_at, "counted, not trained", f"step {report.step}, for the advantages{undone}"),
            )


def _where(record: Record) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


def _position(ref: RecordRef) -> tuple[int, int]:
    return ref.partition, ref.offset
