"""Turns messages about a trajectory into events with a time and a description. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from streamrl.bus.port import Record
from streamrl.inspection.replay.steps import Lineages
from streamrl.schemas.codec import dead_letter_error_class
from streamrl.schemas.reports import CarriedOver, RecordRef, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.trajectories import Trajectory, WorkOrder

StepMessage = StepReport | RefusedStep | CarriedOver
UNDONE = "; undone by a crash or a restore"


@dataclass(frozen=True)
class HistoryEvent:
    """Something that happened. ``at``: seconds since the epoch; ``since``: seconds since the event before."""

    at: float
    what: str
    detail: str
    since: float | None = None


def in_order(events: Iterable[HistoryEvent]) -> tuple[HistoryEvent, ...]:
    """The events sorted by time, each with the seconds since the one before."""
    # A stable sort: events of the same time stay in the order in which they were collected, causes before effects.
    ordered = sorted(events, key=lambda event: event.at)
    return tuple(
        replace(event, since=None if number == 0 else event.at - ordered[number - 1].at)
        for number, event in enumerate(ordered)
    )


def order_event(order: WorkOrder) -> HistoryEvent:
    """The event that the dispatcher orders the trajectory from a worker."""
    estimate = order.estimate
    moves = f", moved {order.moves} times" if order.moves else ""
    return HistoryEvent(
        order.created_at,
        "ordered",
        f"worker {order.worker_id}, attempt {order.attempt}{moves}, prompt position {order.position}, estimated "
        f"{estimate.median} tokens (upper {estimate.upper}, bucket {estimate.bucket}, by {estimate.predictor}), "
        f"admitted at {order.admitted_version}",
    )


def worker_events(trajectory: Trajectory) -> list[HistoryEvent]:
    """The events of sampling, from the trajectory's own fields."""
    tokens, seconds = len(trajectory.token_ids), trajectory.finished_at - trajectory.started_at
    start_detail = f"worker {trajectory.worker_id}, attempt {trajectory.attempt}"
    known = 0
    if trajectory.parts:
        known = trajectory.parts[-1].start
        before = ", ".join(f"{worker} [{start}, {end})" for worker, start, end in parts_of(trajectory)[:-1])
        start_detail += f", from token {known} on; before that {before}"
    rate = f", {(tokens - known) / seconds:.0f} tokens/s" if seconds > 0 else ""
    return [
        HistoryEvent(trajectory.started_at, "continued" if trajectory.parts else "started", start_detail),
        HistoryEvent(
            trajectory.finished_at,
            "finished",
            f"{tokens} tokens (predicted {trajectory.predicted_length}), {trajectory.finish_reason.value}{rate}",
        ),
    ]


def parts_of(trajectory: Trajectory) -> list[tuple[str, int, int]]:
    """The workers that sampled the tokens, in order: worker, first token, and the token after the last."""
    length = len(trajectory.token_ids)
    if not trajectory.parts:
        return [(trajectory.worker_id, 0, length)]
    ends = [*(part.start for part in trajectory.parts[1:]), length]
    return [(part.worker_id, part.start, end) for part, end in zip(trajectory.parts, ends, strict=True)]


def skip_event(row: SkipRecord, *, counts: bool) -> HistoryEvent:
    """The event that the trainer skips the trajectory."""
    undone = "" if counts else UNDONE
    return HistoryEvent(
        row.sent_at, "skipped", f"{row.reason.value} at step {row.step}: {row.detail or 'no detail'}{undone}"
    )


def dead_letter_event(record: Record) -> HistoryEvent:
    """The event that the trainer could not decode the record."""
    reason = (dict(record.headers).get("dlq-error") or b"").decode(errors="replace")
    detail = f"{dead_letter_error_class(record.headers)}: {reason}, as dead letter {record.offset}"
    return HistoryEvent(record.timestamp, "dead-lettered", detail)


def step_events(
    lineages: Lineages, record: Record, report: StepMessage, positions: set[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], HistoryEvent]]:
    """The events that a report contains about the records at these positions."""
    if isinstance(report, CarriedOver):
        detail = f"on another cluster, reported by lineage {report.lineage}"
        event = HistoryEvent(report.sent_at, "finished elsewhere", detail)
        yield from ((position, event) for ref in report.records if (position := position_of(ref)) in positions)
        return
    # A refused gradient changed no weights, so it cannot be undone.
    counts = isinstance(report, StepReport) and lineages.counts(report.version)
    undone = "" if counts or isinstance(report, RefusedStep) else UNDONE
    for number, batch in enumerate(report.micro_batches, 1):
        for row, ref in enumerate(batch, 1):
            if (position := position_of(ref)) in positions:
                micro_batch = f"micro-batch {number} of {len(report.micro_batches)}"
                where = f"step {report.step}, {micro_batch}, row {row} of {len(batch)}"
                if isinstance(report, RefusedStep):
                    yield position, HistoryEvent(report.sent_at, "gradient refused", f"{where}: {report.problem}")
                    continue
                yield position, HistoryEvent(report.sent_at, "trained", f"{where}, weights {report.version}{undone}")
                yield position, HistoryEvent(record.timestamp, "reported", place_of(record))
    for ref in report.left_out:
        if (position := position_of(ref)) in positions:
            yield (
                position,
                HistoryEvent(report.sent_at, "counted, not trained", f"step {report.step}, for the advantages{undone}"),
            )


def place_of(record: Record) -> str:
    """Topic, partition and offset, as text."""
    return f"{record.topic}[{record.partition}]@{record.offset}"


def position_of(ref: RecordRef) -> tuple[int, int]:
    """Partition and offset."""
    return ref.partition, ref.offset
