"""The state of a run as seen from outside, folded from its topics. Pure; time is passed in."""

from collections import Counter
from dataclasses import dataclass, field

from schemas.identifiers import PolicyVersion
from schemas.messages.base import Message
from schemas.messages.reports import Heartbeat, SkipRecord, StepReport, WorkerState

SILENT_AFTER_S = 10.0
NO_VERSION = PolicyVersion(0, 0)


@dataclass(frozen=True)
class StepPoint:
    """One optimizer step: when its report was sent (epoch seconds) and its metrics."""

    step: int
    version: PolicyVersion
    sent_at: float
    trajectories: int
    metrics: dict[str, float]


@dataclass
class RunState:
    """Steps in order, the last heartbeat of every worker, and skips by reason."""

    steps: list[StepPoint] = field(default_factory=list)
    workers: dict[str, Heartbeat] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    version: PolicyVersion = NO_VERSION
    finished: bool = False

    def observe(self, message: Message) -> None:
        """Take one message into account; steps that a resumed trainer took again replace the lost ones."""
        match message:
            case StepReport():
                self._observe_step(message)
            case Heartbeat():
                self.workers[message.worker_id] = message
            case SkipRecord():
                self.skips[message.reason.value] += 1

    def _observe_step(self, report: StepReport) -> None:
        if report.version < self.version:
            return
        self.version = report.version
        self.finished = self.finished or report.finished
        taken = bool(report.micro_batches)
        while self.steps and self.steps[-1].step >= report.step + (not taken):
            self.steps.pop()
        if taken:
            trained = sum(len(batch) for batch in report.micro_batches)
            self.steps.append(StepPoint(report.step, report.version, report.sent_at, trained, report.metrics))

    def living_workers(self, now: float) -> list[Heartbeat]:
        """Workers heard of within ten seconds, by id."""
        return [
            beat
            for _, beat in sorted(self.workers.items())
            if beat.state is not WorkerState.STOPPED and now - beat.sent_at <= SILENT_AFTER_S
        ]

    def trajectories_per_s(self, window: int = 10) -> float:
        """Trained trajectories a second over the last steps."""
        points = self.steps[-window - 1 :]
        if len(points) < 2:
            return 0.0
        elapsed = points[-1].sent_at - points[0].sent_at
        return sum(point.trajectories for point in points[1:]) / elapsed if elapsed > 0 else 0.0

    def latest(self, key: str, default: float = 0.0) -> float:
        """A metric of the newest step."""
        return self.steps[-1].metrics.get(key, default) if self.steps else default
