"""A worker's story: how each sample was generated, scored and sent, and when the weights of a step were taken up."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from bus import port
from observability.tracing.context import Context, LoggedTraces, Memory, context_of, is_sampled, span_id_of, trace_id_of
from observability.tracing.interceptor import Passage, Stored
from observability.tracing.spans import Record, Span, Value, messaging
from schemas.codec import Headers, decode
from schemas.control import WeightsReady
from schemas.identifiers import PolicyVersion
from schemas.reports import RecordRef, SkipRecord, StepReport
from schemas.topics import CONTROL, DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from schemas.trajectories import Trajectory, WorkOrder

# The dispatcher's story: an order begins the trace of its group; one that is sent again goes on with it.


class DispatcherStory:
    """Decides which groups are traced: the trace id follows from the run, the group and when it was created."""

    def __init__(self, run: str, ratio: float, record: Record, logged: LoggedTraces) -> None:
        self.writes = frozenset({WORK_ORDERS.full_name(run)})
        self.reads: frozenset[str] = frozenset()
        self._run, self._ratio, self._record, self._logged = run, ratio, record, logged

    def sending(self, record: port.Outgoing) -> Passage | None:
        """A work order."""
        order = decode(record.value, record.headers)
        if not isinstance(order, WorkOrder):
            return None
        trace_id = trace_id_of(self._run, order.group_id, order.created_at)
        if not is_sampled(trace_id, self._ratio):
            return None
        root = Context(trace_id, span_id_of(trace_id, "dispatch"))
        self._logged.note(order.group_id, root)
        again = Context(trace_id, span_id_of(trace_id, "dispatch", order.attempt))
        context = again if order.attempt else root
        return Passage(context, partial(self._sent, order, context, root if order.attempt else None))

    def read(self, record: port.Record, context: Context) -> None:
        """It reads nothing that belongs to a trace."""

    def _sent(self, order: WorkOrder, context: Context, parent: Context | None, stored: Stored) -> None:
        attributes = messaging("send", stored.topic, stored.partition, stored.offset, order.group_id) | {
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
        start_s = stored.began_s if order.attempt else min(order.created_at, stored.began_s)
        self._record(Span("dispatch", context, parent, start_s, stored.ended_s, "producer", attributes))


# The coordinator's story: the weights of a step are announced, in the step's trace.


class _HeardStep(NamedTuple):
    context: Context
    at_s: float


class CoordinatorStory:
    """Remembers the steps reported; each version is announced at most once."""

    def __init__(self, run: str, record: Record, clock: Callable[[], float] = time.time) -> None:
        self.writes = frozenset({CONTROL.full_name(run)})
        self.reads = frozenset({STEPS.full_name(run)})
        self._record, self._clock = record, clock
        self._reports: Memory[PolicyVersion, _HeardStep] = Memory(1024)

    def read(self, record: port.Record, context: Context) -> None:
        """A step report."""
        if isinstance(report := record.message(), StepReport):
            self._reports.put(report.version, _HeardStep(context, self._clock()))

    def sending(self, record: port.Outgoing) -> Passage | None:
        """A control message."""
        message = decode(record.value, record.headers)
        if not isinstance(message, WeightsReady) or (heard := self._reports.get(message.version)) is None:
            return None
        context = Context(heard.context.trace_id, span_id_of(heard.context.trace_id, "announce", message.sequence))
        return Passage(context, partial(self._announced, message, heard, context))

    def _announced(self, message: WeightsReady, heard: _HeardStep, context: Context, stored: Stored) -> None:
        attributes = messaging("send", stored.topic, stored.partition, stored.offset, None) | {
            "streamrl.step": message.step,
            "streamrl.policy.version": str(message.version),
        }
        self._record(
            Span("announce weights", context, heard.context, heard.at_s, stored.ended_s, "producer", attributes)
        )


# The trainer's story: what became of each trajectory, and the optimizer step that links all of them.

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

    def read(self, record: port.Record, context: Context) -> None:
        """A trajectory."""
        self._held.put((record.partition, record.offset), _Held(context, self._clock(), record.key))
        if record.key is not None:
            self._logged.note(record.key, context)

    def sending(self, record: port.Outgoing) -> Passage | None:
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
                attributes = _trainer_span(report) | {
                    "streamrl.micro_batch": index,
                    "streamrl.trajectory_id": ref.trajectory_id,
                }
                self._ended("train", held, ref, stored.ended_s, attributes, links=[step])
        links = [held.context for held in first.values()]
        start_s = report.sent_at - report.metrics.get(WHOLE_STEP, 0.0)
        attributes = _trainer_span(report) | _told(report)
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


def _trainer_span(report: StepReport) -> dict[str, Value]:
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


class _Heard(NamedTuple):
    context: Context
    at_s: float


class _Generated(NamedTuple):
    first_s: float
    ended_s: float


class WorkerStory:
    """Of one worker; its engine tells it what no message says."""

    def __init__(
        self, run: str, worker_id: str, record: Record, logged: LoggedTraces, clock: Callable[[], float] = time.time
    ) -> None:
        self.writes = frozenset({TRAJECTORIES.full_name(run)})
        self.reads = frozenset({WORK_ORDERS.full_name(run), CONTROL.full_name(run)})
        self.clock = clock
        self._worker_id, self._record, self._logged = worker_id, record, logged
        self._orders: Memory[str, _Heard] = Memory()
        self._weights: Memory[PolicyVersion, _Heard] = Memory(64)
        self._generated: Memory[str, _Generated] = Memory()

    def read(self, record: port.Record, context: Context) -> None:
        """An order, or weights that were announced."""
        if record.key is None:
            return
        if record.topic.endswith(WORK_ORDERS.name):
            self._orders.put(record.key, _Heard(context, self.clock()))
            self._logged.note(record.key, context)
        elif isinstance(message := record.message(), WeightsReady):
            self._weights.put(message.version, _Heard(context, self.clock()))

    def follows(self, trajectory_id: str) -> bool:
        """Whether this sample belongs to a trace."""
        return self._orders.get(trajectory_id.rpartition("/")[0]) is not None

    def generated(self, trajectory_id: str, first_s: float) -> None:
        """The engine gave the last token now, and the first one then."""
        self._generated.put(trajectory_id, _Generated(first_s, self.clock()))

    def adopted(self, version: PolicyVersion, began_s: float) -> None:
        """The engine took up these weights from then to now."""
        if (heard := self._weights.pop(version)) is None:
            return
        attributes: dict[str, Value] = {
            "streamrl.worker_id": self._worker_id,
            "streamrl.policy.version": str(version),
        }
        for name, start_s, end_s in (("fetch weights", heard.at_s, began_s), ("adopt weights", began_s, self.clock())):
            context = Context(heard.context.trace_id, span_id_of(self._worker_id, version, name, start_s))
            self._record(Span(name, context, heard.context, start_s, end_s, "consumer", attributes))

    def sending(self, record: port.Outgoing) -> Passage | None:
        """A trajectory."""
        heard = self._orders.get(record.key) if record.key is not None else None
        if heard is None or not isinstance(one := decode(record.value, record.headers), Trajectory):
            return None
        sample = self._part(heard.context, one, "sample")
        context = self._part(sample, one, "send trajectories")
        return Passage(context, partial(self._sent, one, heard, sample, context))

    def _part(self, within: Context, one: Trajectory, name: str) -> Context:
        return Context(within.trace_id, span_id_of(one.trajectory_id, one.attempt, self._worker_id, name))

    def _sent(self, one: Trajectory, heard: _Heard, sample: Context, context: Context, stored: Stored) -> None:
        begun_s = min(heard.at_s, one.started_at)
        names = {**_of(one), "streamrl.worker_id": self._worker_id}
        self._record(Span("sample", sample, heard.context, begun_s, stored.ended_s, "consumer", names))
        if (generated := self._generated.pop(one.trajectory_id)) is not None:
            spent: dict[str, Value] = {"streamrl.time_to_first_token_s": max(0.0, generated.first_s - one.started_at)}
            self._tell("generate", sample, one, one.started_at, generated.ended_s, _generation(one) | spent)
            self._tell("reward", sample, one, generated.ended_s, one.finished_at, _rewards(one))
        sent = messaging("send", stored.topic, stored.partition, stored.offset, one.group_id)
        span = Span("send trajectories", context, sample, stored.began_s, stored.ended_s, "producer", _of(one) | sent)
        self._record(span)

    def _tell(
        self, name: str, parent: Context, one: Trajectory, start_s: float, end_s: float, found: dict[str, Value]
    ) -> None:
        problem = "; ".join(one.reward_errors.values())[:300] if name == "reward" else ""
        context = self._part(parent, one, name)
        self._record(
            Span(name, context, parent, start_s, max(start_s, end_s), attributes=_of(one) | found, problem=problem)
        )


def _of(one: Trajectory) -> dict[str, Value]:
    return {
        "streamrl.trajectory_id": one.trajectory_id,
        "streamrl.group_id": one.group_id,
        "streamrl.attempt": one.attempt,
    }


def _generation(one: Trajectory) -> dict[str, Value]:
    return {
        "gen_ai.usage.input_tokens": len(one.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(one.token_ids),
        "streamrl.predicted_length": one.predicted_length,
        "streamrl.finish_reason": one.finish_reason.value,
        "streamrl.policy.versions": [str(span.version) for span in one.version_spans],
    }


def _rewards(one: Trajectory) -> dict[str, Value]:
    return {f"streamrl.reward.{name}": value for name, value in one.rewards.items() if value is not None}
