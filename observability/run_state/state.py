"""A run's present, folded from the records of its topics. Pure and bounded: time comes with the records.

Invariants, each with a test of its name:
- it_stays_bounded: however many records come, what is held has an upper limit;
- a_resumed_trainer_takes_its_steps_back: of steps taken again, the newer ones count;
- every_trajectory_is_counted: also those that are not looked into, because very many came at once.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bus.port import Record
from observability.run_state.aggregates import (
    NEWEST,
    Calibration,
    Curves,
    EventLog,
    Fates,
    Lane,
    Rate,
    Sketch,
    Staleness,
    sampled,
    sketch_of,
)
from observability.run_state.observer import NO_VERSION, SILENT_AFTER_S
from schemas.control import DrainWorker, FlowControl, RunFinished, WeightsReady
from schemas.errors import WireError
from schemas.identifiers import PolicyVersion
from schemas.messages import Message
from schemas.reports import Heartbeat, RefusedStep, SkipRecord, StepReport, WorkerState
from schemas.topics import DEAD_LETTERS, TRAJECTORIES

SHOWN_TRAJECTORIES = NEWEST
LENGTH_WEIGHT = 0.01
WORKERS_HELD = 256
EVENT_EVERY_STEPS = 10
AWAY_S = 15.0
"""After so long without a read, the broker is away."""
CURVES = (
    "reward",
    "reward_std",
    "completions/mean_length",
    "completions/max_length",
    "off_policy/mean",
    "off_policy/max",
    "loss",
    "grad_norm",
    "entropy",
    "time/train_share",
)
PHASES = (
    ("wait", "time/wait_for_batch"),
    ("train", "time/forward_backward"),
    ("optimizer", "time/optimizer"),
    ("checkpoint", "time/save_ckpt"),
    ("publish", "time/broadcast_weights"),
)
"""Of a step, in the order in which they are drawn; the report tells their sums only."""
TRAINER, COORDINATOR = "trainer", "coordinator"


def _rates() -> dict[str, Rate]:
    slow = {"orders": 30.0, "steps": 30.0, "trained": 30.0, "weights": 30.0}
    names = ("trajectories", "tokens", "skips", "dead_letters", *slow)
    return {name: Rate(slow.get(name, 5.0)) for name in names}


@dataclass
class LiveState:
    """What is known of a run. ``snapshot`` in ``observability.run_state.snapshot`` turns it into plain data.

    ``read_at``: when the topics were last read to their ends, in epoch seconds. ``mean_length``: of the newest
    completions, in tokens. ``bucket_of``: length buckets by partition.
    """

    run: str
    rates: dict[str, Rate] = field(default_factory=_rates)
    workers: dict[str, Heartbeat] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    curves: Curves = field(default_factory=lambda: Curves(CURVES))
    calibration: Calibration = field(default_factory=Calibration)
    staleness: Staleness = field(default_factory=Staleness)
    fates: Fates = field(default_factory=Fates)
    log: EventLog = field(default_factory=EventLog)
    last: deque[Sketch] = field(default_factory=lambda: deque(maxlen=SHOWN_TRAJECTORIES))
    buckets: Counter[int] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    version: PolicyVersion = NO_VERSION
    announced: PolicyVersion = NO_VERSION
    algorithm: str = ""
    step: int = 0
    step_at: float | None = None
    mode: str = "run"
    finished: bool = False
    silent: set[str] = field(default_factory=set)
    read_at: float | None = None
    mean_length: float = 0.0
    bucket_of: dict[int, int] = field(default_factory=dict)

    def moment(self, now: float) -> float:
        """Until when the run is known, of which displays speak; of the present while nothing can be read."""
        return now if self.read_at is None or now - self.read_at > AWAY_S else min(now, self.read_at)

    def take_all(self, records: Sequence[Record]) -> None:
        """``take`` what came at once, in the order of its times. Of very many trajectories some are looked into, from
        which the tokens of the others are told.
        """
        places = [index for index, record in enumerate(records) if _name_of(record) == TRAJECTORIES.name]
        skipped = set(places) - sampled(places)
        for index, record in enumerate(records):
            if index in skipped and record.partition in self.bucket_of:
                self._count_trajectory(record.timestamp, self.mean_length, self.bucket_of[record.partition])
            else:
                self.take(record)

    def take(self, record: Record) -> None:
        """Take a record of one of the run's topics into account. Dead letters are counted, not decoded."""
        name = _name_of(record)
        if name == TRAJECTORIES.name:
            if (sketch := sketch_of(record)) is not None:
                self.observe_trajectory(sketch, record.timestamp)
        elif name == DEAD_LETTERS.name:
            self.rates["dead_letters"].add(record.timestamp)
            self.log.add(record.timestamp, "bad", "a record was refused; see dead letters")
        else:
            with suppress(WireError):
                self.observe(record.message())

    def observe_trajectory(self, sketch: Sketch, at: float) -> None:
        """A completion came, and was written at this time."""
        bucket = self.bucket_of[sketch.partition] = min(sketch.bucket, 63)
        self._count_trajectory(at, sketch.length, bucket)
        self.mean_length += (sketch.length - self.mean_length) * (LENGTH_WEIGHT if self.mean_length else 1.0)
        self.calibration.add(sketch.predicted, sketch.length)
        self.fates.arrived((sketch.partition, sketch.offset), sketch.oldest.number)
        self.last.append(sketch)
        if (lane := self.worker_lane(sketch.worker_id)) is not None:
            lane.extend(sketch.started_at, sketch.finished_at, "generate", sketch.newest.number)

    def _count_trajectory(self, at: float, tokens: float, bucket: int) -> None:
        self.rates["trajectories"].add(at)
        self.rates["tokens"].add(at, tokens)
        self.buckets[bucket] += 1

    def ordered(self, count: int, at: float) -> None:
        """So many work orders came since this was last told."""
        self.rates["orders"].add(at, count)

    def observe(self, message: Message) -> None:
        """Take a decoded message into account; those that say nothing for a display are passed over."""
        handlers: dict[type[Message], Callable[..., None]] = {
            Heartbeat: self._heartbeat,
            StepReport: self._step,
            RefusedStep: self._refused,
            SkipRecord: self._skip,
            WeightsReady: self._weights,
            FlowControl: self._flow,
            DrainWorker: self._drain,
            RunFinished: self._finish,
        }
        if (handler := handlers.get(type(message))) is not None:
            handler(message)

    def tick(self, now: float) -> None:
        """Notice who has fallen silent."""
        for worker, beat in self.workers.items():
            silent = beat.state is not WorkerState.STOPPED and now - beat.sent_at > SILENT_AFTER_S
            if silent and worker not in self.silent and not self.finished:
                self.silent.add(worker)
                self.log.add(now, "bad", f"{worker} is silent: no heartbeat for {SILENT_AFTER_S:.0f} s")

    def lane(self, name: str) -> Lane:
        """Of a process."""
        return self.lanes.setdefault(name, Lane())

    def worker_lane(self, worker: str) -> Lane | None:
        """Of a worker; None if there are too many to hold."""
        if worker in self.lanes or len(self.lanes) < WORKERS_HELD:
            return self.lane(worker)
        return None

    def _heartbeat(self, beat: Heartbeat) -> None:
        before = self.workers.get(beat.worker_id)
        if before is None and len(self.workers) >= WORKERS_HELD:
            return
        self.workers[beat.worker_id] = beat
        lane = self.lane(beat.worker_id)
        if beat.worker_id in self.silent:
            self.silent.discard(beat.worker_id)
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} is heard again")
        if before is None:
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} joined: {beat.engine}, {beat.capacity} at once")
            return
        if beat.state is not before.state:
            level = "warn" if beat.state in (WorkerState.DRAINING, WorkerState.STOPPED) else "info"
            self.log.add(beat.sent_at, level, f"{beat.worker_id} is {beat.state.value}")
        if beat.incarnation == before.incarnation and before.running and beat.sent_at - before.sent_at < SILENT_AFTER_S:
            lane.extend(before.sent_at, beat.sent_at, "generate", before.version.number)
        if beat.version != before.version:
            lane.mark(beat.sent_at, "adopt", f"weights {beat.version}")

    def _step(self, report: StepReport) -> None:
        if report.version < self.version:
            return
        if self.version != NO_VERSION and report.version.lineage != self.version.lineage:
            self.log.add(report.sent_at, "warn", f"a new trainer goes on from step {report.step}")
        self.version, self.algorithm, self.finished = report.version, report.algorithm, report.finished
        self.step, self.step_at = report.step, report.sent_at
        if not report.micro_batches:
            return
        self.metrics = report.metrics
        self.curves.add(report.step, report.metrics)
        places = [(ref.partition, ref.offset) for batch in report.micro_batches for ref in batch]
        self.staleness.add(self.fates.trained(places, report.step, report.version.number - 1))
        self.rates["steps"].add(report.sent_at)
        self.rates["trained"].add(report.sent_at, len(places))
        self._phases(report)
        if report.step % EVENT_EVERY_STEPS == 0:
            reward = report.metrics.get("reward")
            told = "" if reward is None else f", reward {reward:.3f}"
            self.log.add(report.sent_at, "info", f"step {report.step}{told}")

    def _phases(self, report: StepReport) -> None:
        lane, seconds = self.lane(TRAINER), [(kind, report.metrics.get(key, 0.0)) for kind, key in PHASES]
        at = report.sent_at - sum(taken for _, taken in seconds)
        for kind, taken in seconds:
            lane.extend(at, at + taken, kind, report.step)
            at += taken
        lane.mark(report.sent_at, "step", f"step {report.step}")

    def _refused(self, report: RefusedStep) -> None:
        self.log.add(report.sent_at, "bad", f"step {report.step} refused: {report.problem[:160]}")
        self.lane(TRAINER).mark(report.sent_at, "refused", f"step {report.step} refused")

    def _skip(self, row: SkipRecord) -> None:
        count = 1 if row.end_offset is None else max(1, row.end_offset - row.offset)
        self.skips[row.reason.value] += count
        self.rates["skips"].add(row.sent_at, count)
        self.fates.tell((row.partition, row.offset), f"skipped: {row.reason.value}")
        reason = row.reason.value.replace("_", " ")
        self.log.add(row.sent_at, "warn", f"trajectories skipped at step {row.step}: {reason}", count)

    def _weights(self, message: WeightsReady) -> None:
        self.announced = max(self.announced, message.version)
        self.rates["weights"].add(message.sent_at)
        self.lane(COORDINATOR).mark(message.sent_at, "announce", f"weights {message.version} announced")

    def _flow(self, message: FlowControl) -> None:
        if message.mode != self.mode:
            said = {"run": "the run goes on", "pause": "the run is paused", "drain": "the run is drained"}[message.mode]
            level = "good" if message.mode == "run" else "warn"
            self.log.add(message.sent_at, level, f"{said} ({message.reason})" if message.reason else said)
            self.lane(COORDINATOR).mark(message.sent_at, message.mode, said)
        self.mode = message.mode

    def _drain(self, message: DrainWorker) -> None:
        self.log.add(message.sent_at, "warn", f"{message.worker_id} is asked to leave: {message.reason or 'no reason'}")

    def _finish(self, message: RunFinished) -> None:
        self.finished = True
        self.log.add(message.sent_at, "good", f"the run is finished at step {message.step}: {message.reason}")


def _name_of(record: Record) -> str:
    return record.topic.rpartition(".")[2]
