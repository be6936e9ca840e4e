"""Collects a trajectory's life from the topics: orders, its records, steps, skips, control and heartbeats."""

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from consumers.audit.books.peek import trajectory_id_of
from consumers.replay.lives.life import (
    Appearance,
    Hop,
    Life,
    adopted_hop,
    announced_hop,
    in_order,
    ordered_hop,
    skipped_hop,
    worker_hops,
)
from consumers.replay.steps.chain import StepLog
from schemas.errors import UserError, WireError
from schemas.identifiers import PolicyVersion
from schemas.messages.base import Message
from schemas.messages.control import WeightsReady
from schemas.messages.prompts import WorkOrder
from schemas.messages.reports import Heartbeat, RecordRef, RefusedStep, SkipRecord, StepReport
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Record
from schemas.ports.history import Extent, History
from schemas.wire.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic

PENDING = "pending"
PLACE = re.compile(r"(\d+)@(\d+)")


@dataclass(frozen=True)
class Tracer:
    """Of one run and algorithm."""

    history: History
    run: str
    algorithm: str

    async def trace(self, name: str) -> Life:
        """The life of a trajectory, by id or as ``partition@offset``.

        Raises:
            UserError: there is none, or its record is gone or does not decode.
        """
        found = await self._found(name)
        trajectory = found[0][1]
        places = {(record.partition, record.offset): record for record, _ in found}
        hops = [ordered_hop(order) for order in await self._orders(trajectory)] + worker_hops(trajectory)
        hops += [Hop(record.timestamp, "appended", _where(record)) for record, _ in found]
        fates = dict.fromkeys(places, PENDING)
        told, trained = await self._told_by_trainer(fates)
        hops += told + (await self._weights(trained) if trained is not None else [])
        appearances = tuple(Appearance(*place, record.timestamp, fates[place]) for place, record in places.items())
        return Life(trajectory, appearances, in_order(hops))

    async def _told_by_trainer(self, fates: dict[tuple[int, int], str]) -> tuple[list[Hop], PolicyVersion | None]:
        """Hops from steps and skips, and the weights that it is in; ``fates`` of its records are filled in."""
        log, steps = await self._steps()
        hops: list[Hop] = []
        trained: PolicyVersion | None = None
        for record, report in steps:
            for place, hop in _in_step(log, record, report, set(fates)):
                hops.append(hop)
                if hop.what == "trained" and log.counts(report.version):
                    fates[place], trained = f"trained in step {report.step}", report.version
        for row in await self._skips(set(fates)):
            counts = log.counts_row(row)
            hops.append(skipped_hop(row, counts=counts))
            if counts:
                fates[row.partition, row.offset] = f"skipped: {row.reason.value}"
        reports = [report for _, report in steps if isinstance(report, StepReport)]
        if reports and reports[-1].finished:
            fates |= {place: "left over: the run is finished" for place, fate in fates.items() if fate == PENDING}
        return hops, trained

    async def _found(self, name: str) -> list[tuple[Record, Trajectory]]:
        """Its records, first one first."""
        topic = TRAJECTORIES.full_name(self.run)
        if (match := PLACE.fullmatch(name)) is not None:
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

    async def _skips(self, places: set[tuple[int, int]]) -> list[SkipRecord]:
        rows = {
            (message.lineage, message.sequence, message.partition, message.offset): message
            async for _, message in self._messages(SKIPS)
            if isinstance(message, SkipRecord)
            and message.algorithm == self.algorithm
            and (message.partition, message.offset) in places
        }
        return list(rows.values())

    async def _weights(self, version: PolicyVersion) -> list[Hop]:
        """When weights that contain it were announced, and first used."""
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
        return [announced_hop(message, version) for message in announced[:1]] + [
            adopted_hop(message, version) for message in beats[:1]
        ]

    async def _messages(self, topic: Topic, key: str | None = None) -> AsyncIterator[tuple[Record, Message]]:
        async for record in self.history.records(topic.full_name(self.run)):
            if key is not None and record.key != key:
                continue
            try:
                yield record, record.message()
            except WireError:
                continue


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
    log: StepLog, record: Record, report: StepReport | RefusedStep, places: set[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], Hop]]:
    """What this report says of the records at these places."""
    counts = isinstance(report, StepReport) and log.counts(report.version)
    undone = "" if counts or isinstance(report, RefusedStep) else "; undone by a crash"
    for number, batch in enumerate(report.micro_batches, 1):
        for row, ref in enumerate(batch, 1):
            if (place := _place(ref)) in places:
                micro_batch = f"micro-batch {number} of {len(report.micro_batches)}"
                where = f"step {report.step}, {micro_batch}, row {row} of {len(batch)}"
                if isinstance(report, RefusedStep):
                    yield place, Hop(report.sent_at, "gradient refused", f"{where}: {report.problem}")
                    continue
                yield place, Hop(report.sent_at, "trained", f"{where}, weights {report.version}{undone}")
                yield place, Hop(record.timestamp, "reported", _where(record))
    for ref in report.left_out:
        if (place := _place(ref)) in places:
            yield place, Hop(report.sent_at, "counted, not trained", f"step {report.step}, for the advantages{undone}")


def _where(record: Record) -> str:
    return f"{record.topic}[{record.partition}]@{record.offset}"


def _place(ref: RecordRef) -> tuple[int, int]:
    return ref.partition, ref.offset
