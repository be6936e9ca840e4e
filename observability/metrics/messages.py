"""Messages into meters: what a step report, a skip row, a heartbeat or a control message says in figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from observability.metrics.families import Meters
from observability.run_state.observer import LAG_PREFIX
from schemas.codec import Headers
from schemas.control import FlowControl, RunFinished, WeightsReady
from schemas.messages import Message
from schemas.reports import Heartbeat, RefusedStep, SkipRecord, StepReport, WorkerState

PHASES = "time/"
WHOLE_STEP = "time/step"
SHARE = "_share"
GAUGES = {
    "kafka/intake_latency_s": "intake_latency_seconds",
    "kafka/pending_bytes": "intake_pending_bytes",
    "off_policy/mean": "staleness_mean_versions",
    "off_policy/max": "staleness_max_versions",
    "reward": "reward_mean",
    "frac_reward_zero_std": "reward_zero_std_ratio",
    "completions/mean_length": "completion_length_mean_tokens",
    "completions/clipped_ratio": "completion_clipped_ratio",
}
"""Metrics of a step that have a family of their own."""
MODES = ("run", "pause", "drain")
ERROR_HEADER = "dlq-error-class"


@dataclass
class TrainerMessages:
    """What the trainer announces. A report that is announced again counts once."""

    meters: Meters
    _newest: tuple[int, int] = (-1, -1)

    def take(self, message: Message) -> None:
        """A step report, a refused step, or a skip row."""
        match message:
            case StepReport():
                self._step(message)
            case RefusedStep():
                self.meters.count("trainer_refused_steps", message.algorithm)
            case SkipRecord():
                count = 1 if message.end_offset is None else message.end_offset - message.offset
                self.meters.count("skipped_trajectories", message.algorithm, message.reason.value, by=count)

    def take_dead_letter(self, _value: bytes | None, headers: Headers) -> None:
        """A record that did not decode."""
        found = next((content for name, content in headers if name == ERROR_HEADER), b"unknown")
        self.meters.count("dead_letters", found.decode(errors="replace"))

    def _step(self, report: StepReport) -> None:
        name = report.algorithm
        self.meters.set(report.version.number, "trainer_policy_version", name)
        self.meters.set(report.version.lineage, "trainer_policy_lineage", name)
        if tuple(report.version) <= self._newest or not report.micro_batches:
            return
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
            if key in GAUGES:
                self.meters.set(value, GAUGES[key], name)
            elif key == WHOLE_STEP:
                self.meters.observe(value, "trainer_step_duration_seconds", name)
            elif key.startswith(PHASES) and not key.endswith(SHARE):
                self.meters.count("trainer_phase_seconds", name, key.removeprefix(PHASES), by=max(0.0, value))
            elif key.startswith(LAG_PREFIX):
                self.meters.set(value, "unfinished_trajectories", name, key.removeprefix(LAG_PREFIX))


@dataclass
class WorkerMessages:
    """What a worker says of itself."""

    meters: Meters

    def take(self, message: Message) -> None:
        """A heartbeat."""
        if not isinstance(message, Heartbeat):
            return
        name, meters = message.worker_id, self.meters
        meters.count_to(message.generated_tokens, "worker_generated_tokens", name)
        meters.count_to(message.finished_trajectories, "worker_finished_trajectories", name)
        meters.set(message.running, "worker_running_completions", name)
        meters.set(message.waiting, "worker_waiting_completions", name)
        meters.set(message.capacity, "worker_capacity_completions", name)
        meters.set(message.version.number, "worker_policy_version", name)
        meters.set_one_of("worker_state", message.state.value, tuple(WorkerState), name)


@dataclass
class CoordinatorMessages:
    """What the coordinator announces, and the heartbeats it hears."""

    meters: Meters
    beats: dict[str, Heartbeat] = field(default_factory=dict)

    def take(self, message: Message) -> None:
        """A control message that it sends."""
        if isinstance(message, WeightsReady):
            self.meters.count("weights_announced")
        self.recall(message)

    def recall(self, message: Message) -> None:
        """A control message that it reads, of an earlier life."""
        match message:
            case WeightsReady():
                self.meters.set(message.version.number, "announced_policy_version")
                self.meters.set(0, "run_finished")
            case FlowControl():
                self.meters.set_one_of("flow_mode", message.mode, MODES)
            case RunFinished():
                self.meters.set(1, "run_finished")

    def hear(self, message: Message) -> None:
        """A heartbeat."""
        if isinstance(message, Heartbeat):
            self.beats[message.worker_id] = message

    def look(self, now: float, silent_s: float) -> None:
        """Count the workers by standing: their state, or ``lost``."""
        standings = [
            "lost" if beat.state is not WorkerState.STOPPED and now - beat.sent_at > silent_s else beat.state.value
            for beat in self.beats.values()
        ]
        for standing in (*WorkerState, "lost"):
            self.meters.set(standings.count(standing), "workers", standing)
