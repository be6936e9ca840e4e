"""The spans of each role: the trace of a group goes from its order to the fate of every sample.

An order starts the trace of its group (dispatcher). In that trace each sample is generated, scored and sent (worker),
and trained or skipped (trainer). Workers have their own module (``worker_tracer``), and roles of optional features
bring their own tracers. A step has its own trace, linked with those of its many groups. In the step's trace, its
weights are announced (coordinator) and adopted (workers).
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachetools import FIFOCache

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.tracing.context import (
    AttributeValue,
    ExportSpan,
    LoggedTraces,
    SpanContext,
    TraceSpan,
    context_of,
    is_sampled,
    messaging_attributes,
    span_id_of,
    trace_id_of,
)
from streamrl.observability.tracing.observer import OutgoingTrace, RoleTracer, StoredRecord, TracingObserver
from streamrl.observability.tracing.settings import TelemetrySettings, sampled_share
from streamrl.observability.tracing.worker_tracer import ReceivedContext, TracedEngine, WorkerTracer
from streamrl.producers.generation.engines.port import Engine
from streamrl.schemas.codec import Headers, decode
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.extras import require_extra
from streamrl.schemas.identifiers import PolicyVersion, group_id_of, named_version, parse_scope
from streamrl.schemas.reports import RecordRef, SkipRecord, StepReport
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import WorkOrder

PENDING = 200_000
"""Number of trajectories that the trainer's tracer remembers until their fate is known: more than ingest ever holds."""
STEP_METRICS = ("reward", "loss", "grad_norm", "off_policy/mean", "completions/mean_length")
"""Metrics of a step that its span contains, besides the phases."""
PHASES, WHOLE_STEP = "time/", "time/step"


OpenTracer = Callable[[str, float, ExportSpan, LoggedTraces], RoleTracer]
"""Opens the tracer of a feature's role. Arguments: run, share of traces to keep, span exporter, and traces in logs."""


@dataclass(frozen=True)
class Tracing:
    """The tracing of a role: an observer at its bus, and a wrapper around a worker's engine.

    ``tracer``: the tracer, except a worker's; a feature's role may show it more than the records on the bus.
    """

    observer: TracingObserver
    worker: WorkerTracer | None = None
    tracer: RoleTracer | None = None

    def around(self, engine: Engine) -> Engine:
        """The engine, wrapped if the role is a worker."""
        return engine if self.worker is None else TracedEngine(engine, self.worker)


@contextmanager
def open_tracing(
    role: str,
    process: str,
    run_name: str,
    settings: TelemetrySettings,
    run_path: Path,
    logged: LoggedTraces,
    open_tracer: OpenTracer | None = None,
) -> Iterator[Tracing | None]:
    """Export the role's spans during the block, and the last ones at its end, in bounded time.

    ``open_tracer``: opens the tracer of a feature's role. Gives None without ``telemetry.traces``, and for roles
    without a tracer.
    """
    if settings.traces == "off":
        yield None
        return
    require_extra("traces", f"telemetry.traces = {settings.traces!r}")
    from streamrl.observability.tracing.exporting import open_exporting

    exporting = open_exporting(settings, run_path, role, process)
    try:
        yield tracing_of(role, process, run_name, sampled_share(), exporting.record, logged, open_tracer)
    finally:
        exporting.close()


def tracing_of(
    role: str,
    process: str,
    run_name: str,
    sample_ratio: float,
    export: ExportSpan,
    logged: LoggedTraces,
    open_tracer: OpenTracer | None = None,
) -> Tracing | None:
    """The tracing of a role; None for a role without a tracer."""
    tracer: RoleTracer
    match role:
        case "dispatcher":
            tracer = DispatcherTracer(run_name, sample_ratio, export, logged)
        case "trainer":
            tracer = TrainerTracer(run_name, export, logged)
        case "coordinator":
            tracer = CoordinatorTracer(run_name, export)
        case "worker":
            worker = WorkerTracer(run_name, process, export, logged)
            return Tracing(TracingObserver(worker), worker)
        case _ if open_tracer is not None:
            tracer = open_tracer(run_name, sample_ratio, export, logged)
        case _:
            return None
    return Tracing(TracingObserver(tracer), tracer=tracer)


class DispatcherTracer:
    """Decides which groups are traced. The trace id follows from the run, the group and its time of creation."""

    def __init__(self, run: str, ratio: float, export: ExportSpan, logged: LoggedTraces) -> None:
        self.writes = frozenset({WORK_ORDERS.full_name(run)})
        self.reads: frozenset[str] = frozenset()
        self._run, self._ratio, self._export, self._logged = run, ratio, export, logged

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """Start the trace of a work order."""
        order = decode(record.value, record.headers)
        if not isinstance(order, WorkOrder):
            return None
        # created_at distinguishes equal groups of two runs with one name; a repeated order has the same created_at
        trace_id = trace_id_of(self._run, order.group_id, order.created_at)
        if not is_sampled(trace_id, self._ratio):
            return None
        # ids follow from names, so that the root span of a repeated order is known without being stored
        root = SpanContext(trace_id, span_id_of(trace_id, "dispatch"))
        self._logged.add(order.group_id, root)
        again = SpanContext(trace_id, span_id_of(trace_id, "dispatch", order.attempt))
        context = again if order.attempt else root
        return OutgoingTrace(context, partial(self._sent, order, context, root if order.attempt else None))

    def received(self, record: Record, context: SpanContext) -> None:
        """Do nothing: the dispatcher reads no record that belongs to a trace."""

    def _sent(self, order: WorkOrder, context: SpanContext, parent: SpanContext | None, stored: StoredRecord) -> None:
        attributes = messaging_attributes("send", stored.topic, stored.partition, stored.offset, order.group_id) | {
            "streamrl.group_id": order.group_id,
            "streamrl.prompt_id": order.prompt.prompt_id,
            "streamrl.prompt_position": order.position,
            "streamrl.worker_id": order.worker_id,
            "streamrl.attempt": order.attempt,
            "streamrl.samples": len(order.sample_indices),
            "streamrl.predicted_length": order.estimate.median,
            "streamrl.bucket": order.estimate.bucket,
            "streamrl.policy.admitted_version": str(order.admitted_version),
        }
        # the span of a first order starts when the order was made, that of a repeated one when it was sent
        start_s = stored.began_s if order.attempt else min(order.created_at, stored.began_s)
        self._export(TraceSpan("dispatch", context, parent, start_s, stored.ended_s, "producer", attributes))


class _Held(NamedTuple):
    """A trajectory that was read and has no fate yet."""

    context: SpanContext
    read_s: float
    key: str | None


class TrainerTracer:
    """The trainer's tracer. A step has its own trace; it is traced if any of its trajectories is."""

    def __init__(
        self, run: str, export: ExportSpan, logged: LoggedTraces, clock: Callable[[], float] = time.time
    ) -> None:
        # An instance, besides the run's own trainer, writes under its own scope and reads the run's stream.
        self._steps, self._skips, self._dead_letters = (topic.full_name(run) for topic in (STEPS, SKIPS, DEAD_LETTERS))
        self._topic = TRAJECTORIES.full_name(parse_scope(run)[0])
        self.writes = frozenset({self._steps, self._skips, self._dead_letters})
        self.reads = frozenset({self._topic})
        self._run, self._export, self._logged, self._clock = run, export, logged, clock
        self._held: FIFOCache[tuple[int, int], _Held] = FIFOCache(PENDING)

    def received(self, record: Record, context: SpanContext) -> None:
        """Take a trajectory that was read."""
        self._held[(record.partition, record.offset)] = _Held(context, self._clock(), record.key)
        if record.key is not None:
            self._logged.add(record.key, context)

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """Take a step report, a skip row, or a dead letter that is about to be sent."""
        if record.topic == self._dead_letters:
            context = context_of(record.headers)  # a dead letter keeps the headers of the record
            return None if context is None else OutgoingTrace(None, partial(self._dead, context, record.headers))
        match decode(record.value, record.headers):
            case StepReport() as report:
                return self._reporting(report)
            case SkipRecord() as row if (held := self._held.get((row.partition, row.offset))) is not None:
                return OutgoingTrace(None, partial(self._skipped, row, held))
        return None

    def _reporting(self, report: StepReport) -> OutgoingTrace | None:
        if not any(self._held.get((ref.partition, ref.offset)) for ref in report.trained_refs):
            return None
        # only looked up here, not removed: if sending fails, the report comes again and needs them
        trace_id = trace_id_of(self._run, "step", report.version, report.sent_at)
        context = SpanContext(trace_id, span_id_of(trace_id, "step"))
        return OutgoingTrace(context, partial(self._stepped, report, context))

    def _stepped(self, report: StepReport, step: SpanContext, stored: StoredRecord) -> None:
        first: dict[str, _Held] = {}  # one sample of each group, so that a step has one link per group
        for index, batch in enumerate(report.micro_batches):
            for ref, held in self._known(batch):
                first.setdefault(group_id_of(ref.trajectory_id), held)
                attributes = _trainer_span(report) | {
                    "streamrl.micro_batch": index,
                    "streamrl.trajectory_id": ref.trajectory_id,
                }
                # a link, since a span has only one parent, and this span's is in the group's trace
                self._ended("train", held, ref, stored.ended_s, attributes, links=[step])
        links = [held.context for held in first.values()]
        # the report is made at the end of the step, and contains the step's seconds
        start_s = report.sent_at - report.metrics.get(WHOLE_STEP, 0.0)
        attributes = _trainer_span(report) | _step_attributes(report)
        self._export(
            TraceSpan(
                "optimizer step", step, None, start_s, max(start_s, stored.ended_s), "consumer", attributes, links
            )
        )

    def _known(self, refs: Iterable[RecordRef]) -> Iterable[tuple[RecordRef, _Held]]:
        # popped: a step that is reported again has its spans already
        for ref in refs:
            if (held := self._held.pop((ref.partition, ref.offset), None)) is not None:
                yield ref, held

    def _skipped(self, row: SkipRecord, held: _Held, stored: StoredRecord) -> None:
        if self._held.pop((row.partition, row.offset), None) is None:
            return  # the row was sent again
        ref = RecordRef(row.trajectory_id or "", row.partition, row.offset)
        attributes: dict[str, AttributeValue] = {
            "streamrl.algorithm": row.algorithm,
            "streamrl.step": row.step,
            "streamrl.skip.reason": row.reason.value,
            "streamrl.skip.detail": row.detail,
            "streamrl.trajectory_id": ref.trajectory_id,
        }
        self._ended("skip", held, ref, stored.ended_s, attributes)

    def _ended(
        self,
        name: str,
        held: _Held,
        ref: RecordRef,
        end_s: float,
        attributes: dict[str, AttributeValue],
        links: tuple[SpanContext, ...] | list[SpanContext] = (),
    ) -> None:
        """Export the span of one record's fate, which starts when the record was read."""
        # read_s distinguishes a trainer from one that resumed from it and handled the same record
        context = SpanContext(held.context.trace_id, span_id_of(name, *ref, held.read_s))
        found = messaging_attributes("process", self._topic, ref.partition, ref.offset, held.key) | attributes
        self._export(TraceSpan(name, context, held.context, held.read_s, end_s, "consumer", found, links))

    def _dead(self, parent: SpanContext, headers: Headers, stored: StoredRecord) -> None:
        named = {
            name: (content or b"").decode(errors="replace") for name, content in headers if name.startswith("dlq-")
        }
        context = SpanContext(parent.trace_id, span_id_of(stored.topic, stored.partition, stored.offset))
        attributes = messaging_attributes("send", stored.topic, stored.partition, stored.offset, None)
        problem = f"{named.get('dlq-error-class', 'unknown')}: {named.get('dlq-error', '')}"
        self._export(
            TraceSpan(
                "dead letter", context, parent, stored.began_s, stored.ended_s, "producer", attributes, (), problem
            )
        )


def _trainer_span(report: StepReport) -> dict[str, AttributeValue]:
    return {
        "streamrl.algorithm": report.algorithm,
        "streamrl.step": report.step,
        "streamrl.policy.version": named_version(report.policy, report.version),
    }


def _step_attributes(report: StepReport) -> dict[str, AttributeValue]:
    metrics: dict[str, AttributeValue] = {
        f"streamrl.metric.{name}": value
        for name, value in report.metrics.items()
        if name in STEP_METRICS or name.startswith(PHASES)
    }
    return metrics | {
        "messaging.batch.message_count": sum(len(batch) for batch in report.micro_batches),
        "streamrl.groups": len(report.group_ids),
        "streamrl.micro_batches": len(report.micro_batches),
    }


class CoordinatorTracer:
    """The coordinator's tracer. It remembers reported steps until their weights are announced."""

    def __init__(self, run: str, export: ExportSpan, clock: Callable[[], float] = time.time) -> None:
        self.writes = frozenset({CONTROL.full_name(run)})
        self.reads = frozenset({STEPS.full_name(run)})
        self._export, self._clock = export, clock
        self._reports: FIFOCache[PolicyVersion, ReceivedContext] = FIFOCache(1024)  # of the newest steps

    def received(self, record: Record, context: SpanContext) -> None:
        """Take a step report."""
        if isinstance(report := record.message(), StepReport):
            self._reports[report.version] = ReceivedContext(context, self._clock())

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """Take a control message that is about to be sent."""
        message = decode(record.value, record.headers)
        if not isinstance(message, WeightsReady) or (heard := self._reports.get(message.version)) is None:
            return None
        context = SpanContext(heard.context.trace_id, span_id_of(heard.context.trace_id, "announce", message.sequence))
        return OutgoingTrace(context, partial(self._announced, message, heard, context))

    def _announced(
        self, message: WeightsReady, heard: ReceivedContext, context: SpanContext, stored: StoredRecord
    ) -> None:
        attributes = messaging_attributes("send", stored.topic, stored.partition, stored.offset, None) | {
            "streamrl.step": message.step,
            "streamrl.policy.version": str(message.version),
        }
        self._export(
            TraceSpan("announce weights", context, heard.context, heard.at_s, stored.ended_s, "producer", attributes)
        )
