"""Metrics from the records on a role's bus: an observer that counts them, and meters that read their messages.

Each role is measured by its own messages: the trainer by its reports, a worker by its heartbeats, the coordinator by
its announcements and the heartbeats that it reads. For the dispatcher, its status is read instead.

Invariant measuring_never_fails: a meter that raises is logged once and dropped; records are still counted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.interceptor import DeliveryReport
from streamrl.observability.metrics.families import Meters
from streamrl.observability.run_state.aggregates import LAG_PREFIX
from streamrl.observability.usage import UsageSampler, own_usage
from streamrl.schemas.codec import Headers, dead_letter_error_class, decode
from streamrl.schemas.control import FlowControl, RunFinished, WeightsReady
from streamrl.schemas.errors import BusError, WireError
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import Heartbeat, RefusedStep, SkipRecord, StepReport, WorkerState
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS

if TYPE_CHECKING:
    from streamrl.producers.dispatch.status import DispatcherStatus

log = structlog.get_logger()

SILENT_S = 10.0
"""Seconds without a heartbeat after which a worker counts as lost; heartbeats come every second."""
MODES = ("run", "pause", "drain")

PHASES, WHOLE_STEP, SHARE = "time/", "time/step", "_share"
STEP_GAUGES = {
    "kafka/ingest_latency_s": "ingest_latency_seconds",
    "kafka/pending_bytes": "ingest_pending_bytes",
    "off_policy/mean": "staleness_mean_versions",
    "off_policy/max": "staleness_max_versions",
    "reward": "reward_mean",
    "frac_reward_zero_std": "reward_zero_std_ratio",
    "completions/mean_length": "completion_length_mean_tokens",
    "completions/clipped_ratio": "completion_clipped_ratio",
}
"""Metrics of a step that have their own family."""

RecordMeter = Callable[[bytes | None, Headers], None]
"""Called with the value and the headers of each record of one topic."""
Collector = Callable[[], None]
"""Called every few seconds on the event loop, for metrics that no record carries."""


def metering_of(role: str, meters: Meters) -> tuple["MeteringObserver", list[Collector]]:
    """The observer that measures a role at its bus, and the collectors to call every few seconds."""
    observer, run = MeteringObserver(meters), meters.run
    match role:
        case "trainer":
            trainer = TrainerMeter(meters)
            for topic in (STEPS, SKIPS):
                observer.sent[topic.full_name(run)] = of_message(trainer.reported)
            observer.sent[DEAD_LETTERS.full_name(run)] = trainer.dead_letter
        case "worker":
            observer.sent[HEARTBEATS.full_name(run)] = of_message(WorkerMeter(meters).heartbeat)
        case "coordinator":
            coordinator = CoordinatorMeter(meters)
            observer.sent[CONTROL.full_name(run)] = of_message(coordinator.announced)
            observer.read[HEARTBEATS.full_name(run)] = of_message(coordinator.heartbeat)
            observer.read[CONTROL.full_name(run)] = of_message(coordinator.recovered)
            # by the clock, since a lost worker sends nothing that could be counted
            return observer, [lambda: coordinator.collect(SILENT_S)]
    return observer, []


def of_message(meter: Callable[[Message], None]) -> RecordMeter:
    """A record meter that passes the decoded message to ``meter``, and ignores records that do not decode."""

    def read(value: bytes | None, headers: Headers) -> None:
        try:
            message = decode(value, headers)
        except WireError:
            return
        meter(message)

    return read


@dataclass
class MeteringObserver:
    """A ``BusObserver``. ``sent`` and ``read``: the meters for sent and read records, by full name of the topic."""

    meters: Meters
    sent: dict[str, RecordMeter] = field(default_factory=dict)
    read: dict[str, RecordMeter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._prefix = f"{self.meters.run}."

    def sending(self, records: list[Outgoing]) -> "_MeteredDelivery":
        """See ``BusObserver``."""
        return _MeteredDelivery(self, records)

    def received(self, records: Sequence[Record]) -> None:
        """Count the records of a topic together: two counters per record would cost as much as passing it on."""
        totals: dict[str, list[int]] = {}
        for record in records:
            total = totals.setdefault(record.topic, [0, 0])
            total[0] += 1
            total[1] += len(record.value or b"")
            self._show(self.read, record.topic, record.value, record.headers)
        for name, (count, size) in totals.items():
            topic = self._short(name)
            self.meters.count("bus_consumed_records", topic, by=count)
            self.meters.count("bus_consumed_bytes", topic, by=size)

    def accepted(self, records: Sequence[Outgoing]) -> None:
        """Count records that the publisher took or a transaction committed."""
        for record in records:
            topic = self._short(record.topic)
            self.meters.count("bus_published_records", topic)
            self.meters.count("bus_published_bytes", topic, by=len(record.value or b""))
            self._show(self.sent, record.topic, record.value, record.headers)

    def settled(self, records: Sequence[Outgoing], report: DeliveryReport) -> None:
        """Count once per topic how long sending took, or why it failed."""
        # a transaction gets one answer for all of its records
        for topic in {self._short(record.topic) for record in records}:
            if report.error is None:
                self.meters.observe(report.duration_s, "bus_publish_duration_seconds", topic)
            # only our error classes become labels: the names of others are unbounded
            elif isinstance(report.error, BusError):
                self.meters.count("bus_publish_failures", topic, type(report.error).__name__)

    def _short(self, topic: str) -> str:
        return topic.removeprefix(self._prefix)

    def _show(self, meters: dict[str, RecordMeter], topic: str, value: bytes | None, headers: Headers) -> None:
        meter = meters.get(topic)
        if meter is None:
            return
        # guarded here, since the interceptor would drop the whole observer, which counts records
        try:
            meter(value, headers)
        except Exception:
            log.exception("a meter failed; the messages of its topic are no longer measured", topic=topic)
            del meters[topic]


@dataclass(slots=True)
class _MeteredDelivery:
    observer: MeteringObserver
    records: Sequence[Outgoing]

    def accepted(self) -> None:
        self.observer.accepted(self.records)

    def settled(self, report: DeliveryReport) -> None:
        self.observer.settled(self.records, report)


@dataclass
class TrainerMeter:
    """Metrics from the trainer's reports. A repeated report counts once."""

    meters: Meters
    _newest: tuple[int, int] = (-1, -1)

    def reported(self, message: Message) -> None:
        """Take a step report, a refused step, or a skip row."""
        match message:
            case StepReport():
                self._step(message)
            case RefusedStep():
                self.meters.count("trainer_refused_steps", message.algorithm)
            case SkipRecord():
                # one row covers a whole range of offsets if retention deleted them
                count = message.end - message.offset
                self.meters.count("skipped_trajectories", message.algorithm, message.reason.value, by=count)

    def dead_letter(self, _value: bytes | None, headers: Headers) -> None:
        """Take a record that did not decode."""
        self.meters.count("dead_letters", dead_letter_error_class(headers))

    def _step(self, report: StepReport) -> None:
        name = report.algorithm
        # every report sets the version, even one without a batch, such as a trainer's first, of its initial weights
        self.meters.set(report.version.number, "trainer_policy_version", name)
        self.meters.set(report.version.lineage, "trainer_policy_lineage", name)
        if tuple(report.version) <= self._newest or not report.micro_batches:
            return
        # versions are ordered by lineage first, so all steps of a resumed trainer count, even repeated ones
        self._newest = (report.version.lineage, report.version.number)
        self.meters.count("trainer_steps", name)
        self.meters.count("trained_trajectories", name, by=sum(len(batch) for batch in report.micro_batches))
        self.meters.count("trained_groups", name, by=len(report.group_ids))
        self.meters.count("trained_tokens", name, by=report.metrics.get("completions/num_tokens", 0.0))
        self.meters.set(report.sent_at, "last_step_timestamp_seconds", name)
        self._metrics(name, report.metrics)

    def _metrics(self, name: str, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self.meters.set(value, "step_metric", name, key)
            if key in STEP_GAUGES:
                self.meters.set(value, STEP_GAUGES[key], name)
            elif key == WHOLE_STEP:
                self.meters.observe(value, "trainer_step_duration_seconds", name)
            elif key.startswith(PHASES) and not key.endswith(SHARE):
                # a counter refuses negative amounts, which a phase can have if the clock was set back
                self.meters.count("trainer_phase_seconds", name, key.removeprefix(PHASES), by=max(0.0, value))
            elif key.startswith(LAG_PREFIX):
                self.meters.set(value, "unfinished_trajectories", name, key.removeprefix(LAG_PREFIX))


@dataclass
class WorkerMeter:
    """Metrics from a worker's heartbeats."""

    meters: Meters

    def heartbeat(self, message: Message) -> None:
        """Take a heartbeat that the worker sends."""
        if not isinstance(message, Heartbeat):
            return
        name, meters = message.worker_id, self.meters
        # totals since the worker's start, so that a lost heartbeat loses no count
        meters.count_to(message.generated_tokens, "worker_generated_tokens", name)
        meters.count_to(message.finished_trajectories, "worker_finished_trajectories", name)
        meters.set(message.running, "worker_running_completions", name)
        meters.set(message.waiting, "worker_waiting_completions", name)
        meters.set(message.capacity, "worker_capacity_completions", name)
        meters.set(message.version.number, "worker_policy_version", name)
        meters.set_one_of("worker_state", message.state.value, tuple(WorkerState), name)


@dataclass
class CoordinatorMeter:
    """Metrics from the coordinator's announcements, and from the newest heartbeat of each worker.

    ``heard``: each worker's newest heartbeat, and its time of arrival by ``clock``, which is monotonic.
    """

    meters: Meters
    clock: Callable[[], float] = time.monotonic
    heard: dict[str, tuple[Heartbeat, float]] = field(default_factory=dict)

    def announced(self, message: Message) -> None:
        """Take a control message that the coordinator sends."""
        if isinstance(message, WeightsReady):
            self.meters.count("weights_announced")
        self.recovered(message)

    def recovered(self, message: Message) -> None:
        """Take a control message of an earlier coordinator, read at the start: it sets state, and is not counted."""
        match message:
            case WeightsReady():
                self.meters.set(message.version.number, "announced_policy_version")
                # weights after the end mean that the run was continued
                self.meters.set(0, "run_finished")
            case FlowControl():
                self.meters.set_one_of("flow_mode", message.mode, MODES)
            case RunFinished():
                self.meters.set(1, "run_finished")

    def heartbeat(self, message: Message) -> None:
        """Take a heartbeat that the coordinator reads."""
        if isinstance(message, Heartbeat):
            self.heard[message.worker_id] = message, self.clock()

    def collect(self, silent_s: float) -> None:
        """Count the workers by state. Those silent for ``silent_s`` without having stopped count as ``lost``."""
        now = self.clock()
        found = [
            "lost" if beat.state is not WorkerState.STOPPED and now - heard_at > silent_s else beat.state.value
            for beat, heard_at in self.heard.values()
        ]
        # all states, even those without workers: a gauge keeps its last value until it is set again
        for state in (*WorkerState, "lost"):
            self.meters.set(found.count(state), "workers", state)


def collect_dispatcher(status_of: "Callable[[], DispatcherStatus]", meters: Meters) -> None:
    """Set the dispatcher's metrics from its status."""
    status = status_of()
    meters.set(status.orders.in_flight, "dispatcher_groups_in_flight")
    meters.set(status.orders.missing, "dispatcher_samples_missing")
    meters.set(status.workers_ready, "dispatcher_workers_ready")
    meters.set(status.cursor, "dispatcher_prompt_cursor")
    meters.count_to(status.orders.admitted, "dispatcher_admitted_groups")
    meters.count_to(status.orders.reordered, "dispatcher_reordered_groups")
    meters.count_to(status.orders.moved, "dispatcher_moved_groups")
    meters.count_to(status.orders.given_up, "dispatcher_given_up_groups")
    # None before the first completion; a gauge that was never set is not exported
    if (error := status.lengths.mean_abs_error) is not None:
        meters.set(error, "length_prediction_error_tokens")
    if (coverage := status.lengths.coverage) is not None:
        meters.set(coverage, "length_prediction_coverage_ratio")


def meter_usage(meters: Meters, sampler: UsageSampler | None = None) -> None:
    """Set the metrics of a process's usage. A figure that is not known is not exported."""
    usage = (sampler or own_usage()).usage()
    if usage is None:
        return
    meters.set(usage.cores_used, "process_cpu_cores")
    meters.set(usage.memory_bytes, "process_tree_memory_bytes")
    meters.set(usage.machine_busy, "machine_cpu_ratio", usage.host)
    meters.set(usage.machine_used_bytes, "machine_memory_used_bytes", usage.host)
    meters.set(usage.machine_bytes, "machine_memory_bytes", usage.host)
    for gpu in usage.gpus or ():
        labels = (usage.host, gpu.gpu_id, gpu.name)
        for value, name in (
            (gpu.busy, "gpu_utilization_ratio"),
            (gpu.used_bytes, "gpu_memory_used_bytes"),
            (gpu.total_bytes, "gpu_memory_bytes"),
        ):
            if value is not None:
                meters.set(value, name, *labels)
