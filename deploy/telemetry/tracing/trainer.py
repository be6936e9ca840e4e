"""The trainer's story: what became of each trajectory, and the optimizer step that links all of them."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from deploy.telemetry.context import Context, context_of, span_id_of, trace_id_of
from deploy.telemetry.logged import LoggedTraces
from deploy.telemetry.memory import Memory
from deploy.telemetry.spans import Record, Span, Value, messaging
from deploy.telemetry.tracing.bus import Passage, Stored
from schemas.messages.reports import RecordRef, SkipRecord, StepReport
from schemas.ports import bus
from schemas.wire.codec import Headers, decode
from schemas.wire.topics import DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES

PENDING = 200_000
TOLD = ("reward", "loss", "grad_norm", "off_policy/mean", "completions/mean_length")
"""Metrics of a step that stand in its span; the phases do as well."""
PHASES, WHOLE_STEP = "time/", "time/step"


class _Held(NamedTuple):
    """A trajectory that was read and whose fate is not known yet."""

    context: Context
    read_s: float
    key: str | None


class TrainerStory:
    """A step belongs to a trace of its own, as it comes of many; it is traced if any of its trajectories is."""

    def __init__(self, run: str, record: Record, logged: LoggedTraces, clock: Callable[[], float] = time.time) -> None:
        self._steps, self._skips, self._letters = (topic.full_name(run) for topic in (STEPS, SKIPS, DEAD_LETTERS))
        self._topic = TRAJECTORIES.full_name(run)
        self.writes = frozenset({self._steps, self._skips, self._letters})
        self.reads = frozenset({self._topic})
        self._run, self._record, self._logged, self._clock = run, record, logged, clock
        self._held: Memory[tuple[int, int], _Held] = Memory(PENDING)

    def read(self, record: bus.Record, context: Context) -> None:
        """A trajectory."""
        self._held.put((record.partition, record.offset), _Held(context, self._clock(), record.key))
        if record.key is not None:
            self._logged.note(record.key, context)

    def sending(self, record: bus.Outgoing) -> Passage | None:
        """A step report, a skip row, or a dead letter."""
        if record.topic == self._letters:
            context = context_of(record.headers)  # a dead letter keeps the headers of the record
            return None if context is None else Passage(None, partial(self._dead, context, record.headers))
        match decode(record.value, record.headers):
            case StepReport() as report:
                return self._reporting(report)
            case SkipRecord() as row if (held := self._held.get((row.partition, row.offset))) is not None:
                return Passage(None, partial(self._skipped, row, held))
        return None

    def _reporting(self, report: StepReport) -> Passage | None:
        if not any(self._held.get((ref.partition, ref.offset)) for batch in report.micro_batches for ref in batch):
            return None
        trace_id = trace_id_of(self._run, "step", report.version, report.sent_at)
        context = Context(trace_id, span_id_of(trace_id, "step"))
        return Passage(context, partial(self._stepped, report, context))

    def _stepped(self, report: StepReport, step: Context, stored: Stored) -> None:
        first: dict[str, _Held] = {}
        for index, batch in enumerate(report.micro_batches):
            for ref, held in self._known(batch):
                first.setdefault(ref.trajectory_id.rpartition("/")[0], held)
                attributes = _of(report) | {"streamrl.micro_batch": index, "streamrl.trajectory_id": ref.trajectory_id}
                self._ended("train", held, ref, stored.ended_s, attributes, links=[step])
        links = [held.context for held in first.values()]
        start_s = report.sent_at - report.metrics.get(WHOLE_STEP, 0.0)
        attributes = _of(report) | _told(report)
        self._record(
            Span("optimizer step", step, None, start_s, max(start_s, stored.ended_s), "consumer", attributes, links)
        )

    def _known(self, refs: Iterable[RecordRef]) -> Iterable[tuple[RecordRef, _Held]]:
        for ref in refs:
            if (held := self._held.pop((ref.partition, ref.offset))) is not None:
                yield ref, held

    def _skipped(self, row: SkipRecord, held: _Held, stored: Stored) -> None:
        if self._held.pop((row.partition, row.offset)) is None:
            return
        ref = RecordRef(row.trajectory_id or "", row.partition, row.offset)
        attributes: dict[str, Value] = {
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
        attributes: dict[str, Value],
        links: tuple[Context, ...] | list[Context] = (),
    ) -> None:
        """What a consumer did with one record: from when it was read."""
        context = Context(held.context.trace_id, span_id_of(name, *ref, held.read_s))
        told = messaging("process", self._topic, ref.partition, ref.offset, held.key) | attributes
        self._record(Span(name, context, held.context, held.read_s, end_s, "consumer", told, links))

    def _dead(self, parent: Context, headers: Headers, stored: Stored) -> None:
        named = {
            name: (content or b"").decode(errors="replace") for name, content in headers if name.startswith("dlq-")
        }
        context = Context(parent.trace_id, span_id_of(stored.topic, stored.partition, stored.offset))
        attributes = messaging("send", stored.topic, stored.partition, stored.offset, None)
        problem = f"{named.get('dlq-error-class', 'unknown')}: {named.get('dlq-error', '')}"
        self._record(
            Span("dead letter", context, parent, stored.began_s, stored.ended_s, "producer", attributes, (), problem)
        )


def _of(report: StepReport) -> dict[str, Value]:
    return {
        "streamrl.algorithm": report.algorithm,
        "streamrl.step": report.step,
        "streamrl.policy.version": str(report.version),
    }


def _told(report: StepReport) -> dict[str, Value]:
    told: dict[str, Value] = {
        f"streamrl.metric.{name}": value
        for name, value in report.metrics.items()
        if name in TOLD or name.startswith(PHASES)
    }
    return told | {
        "messaging.batch.message_count": sum(len(batch) for batch in report.micro_batches),
        "streamrl.groups": len(report.group_ids),
        "streamrl.micro_batches": len(report.micro_batches),
    }
