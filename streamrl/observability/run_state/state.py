"""A run's present, folded from the records of its topics: what every display, `status` and the summary tell.

It is pure: time comes with the records. It takes every record as it stands; what a record means for the run is decided
here and nowhere else, but for ``inspection.audit``, which holds a whole run to account. Invariants, each with a test of
its name:
- it_stays_bounded: however many records come, what is held has an upper limit;
- a_resumed_trainer_takes_its_steps_back: of steps taken again, the newer ones count;
- every_trajectory_is_counted: also those that are not looked into, because very many came at once.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from streamrl.bus.port import Record
from streamrl.observability.run_state.aggregates import (
    LAG_PREFIX,
    NO_VERSION,
    Curves,
    EventLog,
    LengthCalibration,
    Rate,
    StalenessHistogram,
    StepHistory,
    Track,
    TrajectoryFates,
)
from streamrl.observability.run_state.evaluations import EvaluationHistory
from streamrl.observability.run_state.parts import RunPart
from streamrl.observability.run_state.skips import SkipCauses, SkipCounts
from streamrl.observability.run_state.trajectory_summary import NEWEST, TrajectorySummary, sampled, summary_of
from streamrl.schemas.control import DrainWorker, FlowControl, RunFinished, WeightsReady
from streamrl.schemas.errors import WireError
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion, policy_in
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import (
    Heartbeat,
    RefusedStep,
    SkipReason,
    SkipRecord,
    StepReport,
    WorkerState,
)
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES

SILENT_AFTER_S = 10.0
"""Workers beat every second; one of whom nothing was heard for so long is taken for dead in displays."""
FINISHED_PREFIX = "kafka/finished/bucket_"
SKIPPED_PREFIX = "ledger/skipped/"
SHOWN_TRAJECTORIES = NEWEST
WORKERS_HELD = 256
MOST_BUCKETS = 64
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
    "kl",
    "mismatch_kl/all/mean",
    "clip_ratio/region_mean",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
    "time/train_share",
)
CURVE_FAMILIES = (("rewards/", "/mean"),)
"""The parts of the reward, by function."""
PHASES = (
    ("wait", "time/wait_for_batch"),
    ("train", "time/forward_backward"),
    ("optimizer", "time/optimizer"),
    ("checkpoint", "time/save_ckpt"),
    ("publish", "time/broadcast_weights"),
)
"""Of a step, in the order in which they are drawn; the report tells their sums only."""
CAUSED = frozenset({SkipReason.POISON, SkipReason.REFUSED, SkipReason.OUT_OF_MEMORY})
"""Reasons whose details begin, before the first colon, with a cause that many rows share."""
TRAINER, COORDINATOR = "trainer", "coordinator"


def _rates() -> dict[str, Rate]:
    # What comes in bursts, a step at a time, needs a longer window to be a rate at all.
    return {"ordered": Rate(), "sampled": Rate(), "weights": Rate(60.0)}


@dataclass
class RunProgress:
    """How far the run is, and what it was told to do.

    ``version``, ``step``: the newest that were reported, ``step_at`` when; ``announced``: the newest weights that
    workers were told of. ``planned_steps``: how many the run is to take, as its settings say; None: they are not known.
    ``finished_step``: the step at which the coordinator ended the run, -1 if it never did, also once it is continued.
    """

    algorithm: str = ""
    version: PolicyVersion = NO_VERSION
    announced: PolicyVersion = NO_VERSION
    step: int = 0
    step_at: float | None = None
    planned_steps: int | None = None
    mode: str = "run"
    finished: bool = False
    finished_step: int = -1


@dataclass
class LearningHistory:
    """What the optimizer steps and the evaluations measured."""

    steps: StepHistory = field(default_factory=StepHistory)
    curves: Curves = field(default_factory=lambda: Curves(CURVES, families=CURVE_FAMILIES))
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)


@dataclass
class ProcessActivity:
    """Who is there, and what each does. ``workers``: the last heartbeat of each; ``silent``: those not heard of."""

    workers: dict[str, Heartbeat] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    tracks: dict[str, Track] = field(default_factory=dict)
    rates: dict[str, Rate] = field(default_factory=_rates)


@dataclass
class SampledTrajectories:
    """What came onto the topic of trajectories, and what became of it.

    ``buckets``: counts by length bucket, ``bucket_of``: length buckets by partition. ``ends``: offsets behind the last
    trajectory, by length bucket; empty if nobody looks.
    """

    last: deque[TrajectorySummary] = field(default_factory=lambda: deque(maxlen=SHOWN_TRAJECTORIES))
    buckets: Counter[int] = field(default_factory=Counter)
    bucket_of: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    calibration: LengthCalibration = field(default_factory=LengthCalibration)
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)
    fates: TrajectoryFates = field(default_factory=TrajectoryFates)


@dataclass
class RecordRefusals:
    """What was not trained. ``skip_causes``: of those skips that a user may want to do something about, what they have
    in common, by reason. ``dead_letters``: that the topic holds.
    """

    skips: SkipCounts = field(default_factory=SkipCounts)
    skip_causes: dict[str, SkipCauses] = field(default_factory=dict)
    dead_letters: int = 0


@dataclass
class RunState:
    """What is known of a run; its figures are in ``observability.run_state.figures``, all of it as plain data in
    ``observability.run_state.snapshot``.

    ``reward_weights``: of the run's reward functions, as far as they are known; a function without one counts once.
    ``parts``: what optional features add. ``read_at``: when the topics were last read to their ends, in epoch seconds.
    """

    run: str
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[RunPart, ...] = ()
    progress: RunProgress = field(default_factory=RunProgress)
    learning: LearningHistory = field(default_factory=LearningHistory)
    processes: ProcessActivity = field(default_factory=ProcessActivity)
    trajectories: SampledTrajectories = field(default_factory=SampledTrajectories)
    refusals: RecordRefusals = field(default_factory=RecordRefusals)
    log: EventLog = field(default_factory=EventLog)
    read_at: float | None = None
    _warned: str | None = field(init=False, default=None)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the newest step that was taken."""
        newest = self.learning.steps.newest
        return {} if newest is None else newest.metrics

    @property
    def lag(self) -> dict[int, int]:
        """Trajectories on the topic that the trainer has not finished (neither trained nor skipped), by length bucket.

        As it reported with the newest step, and those that came since; without a step, all that came.
        """
        reported, finished = lag_by_bucket(self.metrics), by_bucket(self.metrics, FINISHED_PREFIX)
        ends = self.trajectories.ends
        if not ends or (reported and not finished):  # reports of a version that told no more than the lag
            return reported
        buckets = sorted({*reported, *ends})
        # The trainer may have looked at the ends later than we did.
        return {
            bucket: max(ends.get(bucket, 0) - finished.get(bucket, 0), reported.get(bucket, 0)) for bucket in buckets
        }

    @property
    def skipped(self) -> dict[str, int]:
        """Trajectories skipped since the run began, by reason, but for what a crash undid."""
        return self.refusals.skips.counts()

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps that the run is to take."""
        told = self.metrics.get("progress/max_steps")
        return self.progress.planned_steps if told is None else int(told)

    def living_workers(self, now: float) -> list[Heartbeat]:
        """By id."""
        return [beat for _, beat in sorted(self.processes.workers.items()) if is_alive(beat, now)]

    def known_until(self, now: float) -> float:
        """The moment of which displays speak: when the topics were last read; the present while nothing can be read."""
        return now if self.read_at is None or now - self.read_at > AWAY_S else min(now, self.read_at)

    def observe_records(self, records: Sequence[Record]) -> None:
        """Take into account what came at once, in the order of its times.

        Of very many trajectories some are looked into, and all are counted.
        """
        trajectories = [index for index, record in enumerate(records) if _name_of(record) == TRAJECTORIES.name]
        passed_over = set(trajectories) - sampled(trajectories)
        for index, record in enumerate(records):
            # Partitions belong to one bucket each, so the bucket is known without looking into the record.
            if index in passed_over and record.partition in self.trajectories.bucket_of:
                self._count_trajectory(record.timestamp, self.trajectories.bucket_of[record.partition])
            else:
                self.observe_record(record)

    def observe_record(self, record: Record) -> None:
        """Take a record of one of the run's topics into account. Dead letters are counted, not decoded."""
        name = _name_of(record)
        if name == TRAJECTORIES.name:
            if (summary := summary_of(record, self.reward_weights)) is not None:
                self.observe_trajectory(summary, record.timestamp)
        # Their bytes are whatever could not be decoded once already.
        elif name == DEAD_LETTERS.name:
            self.refusals.dead_letters += 1
            self.log.add(record.timestamp, "bad", "a record was refused; see dead letters")
        else:
            # What does not decode is the business of those who act on it; a display goes on.
            with suppress(WireError):
                self.observe_message(record.message())

    def observe_trajectory(self, summary: TrajectorySummary, at: float) -> None:
        """A completion came, and was written at this time."""
        # Whoever wrote the record may have written any number.
        bucket = self.trajectories.bucket_of[summary.partition] = min(summary.bucket, MOST_BUCKETS - 1)
        self._count_trajectory(at, bucket)
        self.trajectories.calibration.add(summary.predicted, summary.length)
        self.trajectories.fates.arrived((summary.partition, summary.offset), summary.aged_from)
        for part in self.parts:
            part.sampled(summary)
        self.trajectories.last.append(summary)
        if (track := self._worker_track(summary.worker_id)) is not None:
            track.extend(summary.started_at, summary.finished_at, "generate", summary.newest.number)

    def _count_trajectory(self, at: float, bucket: int) -> None:
        self.processes.rates["sampled"].add(at)
        self.trajectories.buckets[bucket] += 1

    def observe_message(self, message: Message) -> None:
        """Take a decoded message into account; those that say nothing of the run's state are passed over."""
        handlers: dict[type[Message], Callable[..., None]] = {
            Heartbeat: self._heartbeat,
            StepReport: self._step,
            RefusedStep: self._refused,
            SkipRecord: self._skip,
            EvaluationReport: self._evaluated,
            WeightsReady: self._weights,
            FlowControl: self._flow,
            DrainWorker: self._drain,
            RunFinished: self._finish,
        }
        if (handler := handlers.get(type(message))) is not None:
            handler(message)
        for part in self.parts:
            part.observe(message, self.log)

    def tick(self, now: float) -> None:
        """Notice who has fallen silent."""
        for worker, beat in self.processes.workers.items():
            silent = beat.state is not WorkerState.STOPPED and not is_alive(beat, now)
            if silent and worker not in self.processes.silent and not self.progress.finished:
                self.processes.silent.add(worker)
                self.log.add(now, "bad", f"{worker} is silent: no heartbeat for {SILENT_AFTER_S:.0f} s")
        warning = self.warning(now)
        if warning is not None and warning != self._warned:
            self.log.add(now, "bad", warning)
        self._warned = warning

    def _track(self, name: str) -> Track:
        """Of a process."""
        return self.processes.tracks.setdefault(name, Track())

    def _worker_track(self, worker: str) -> Track | None:
        """Of a worker; None if there are too many to hold."""
        if worker in self.processes.tracks or len(self.processes.tracks) < WORKERS_HELD:
            return self._track(worker)
        return None

    def _heartbeat(self, beat: Heartbeat) -> None:
        before = self.processes.workers.get(beat.worker_id)
        # Names of workers come from outside: without a limit, whoever makes names up would fill the memory.
        if before is None and len(self.processes.workers) >= WORKERS_HELD:
            return
        self.processes.workers[beat.worker_id] = beat
        track = self._track(beat.worker_id)
        if beat.worker_id in self.processes.silent:
            self.processes.silent.discard(beat.worker_id)
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} is heard again")
        if before is None:
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} joined: {beat.engine}, {beat.capacity} at once")
            return
        if beat.state is not before.state:
            level = "warn" if beat.state in (WorkerState.DRAINING, WorkerState.STOPPED) else "info"
            self.log.add(beat.sent_at, level, f"{beat.worker_id} is {beat.state.value}")
        if beat.incarnation == before.incarnation:
            # What it has been sent, it has finished or still holds.
            self.processes.rates["ordered"].add(beat.sent_at, max(0, _sent_to(beat) - _sent_to(before)))
            # Between two beats of one process it generated if it held completions; a restarted one held none.
            if before.running and beat.sent_at - before.sent_at < SILENT_AFTER_S:
                track.extend(before.sent_at, beat.sent_at, "generate", before.version.number)
        if beat.weights != before.weights:
            track.mark(beat.sent_at, "adopt", f"weights {beat.weights}")

    @property
    def own_trainer_leads(self) -> bool:
        """Whether the run ends with the last step of its own trainer."""
        return all(part.own_trainer_leads for part in self.parts)

    def warning(self, now: float) -> str | None:
        """What a user is to do, in one line; None: nothing."""
        if self.progress.finished:
            return None
        return next((said for part in self.parts if (said := part.warning(now)) is not None), None)

    def _step(self, report: StepReport) -> None:
        if report.policy != policy_in(self.run):
            return
        # A trainer that was replaced may still have written: only the newest lineage counts.
        progress = self.progress
        if report.version < progress.version:
            return
        if progress.version != NO_VERSION and report.version.lineage != progress.version.lineage:
            self.log.add(report.sent_at, "warn", f"a new trainer goes on from step {report.step}")
        if self.own_trainer_leads:
            progress.finished = report.finished
        elif report.version.lineage != progress.version.lineage:
            progress.finished = False  # the run is continued; beside a policy that leads, its last step ends nothing
        progress.version, progress.algorithm = report.version, report.algorithm
        progress.step, progress.step_at = report.step, report.sent_at
        taken = self.learning.steps.add(report)
        self.refusals.skips.report(report.version.lineage, report.sent_at, by_reason(self.metrics))
        if not taken:
            return
        self.learning.curves.add(report.step, report.metrics)
        positions = [(ref.partition, ref.offset) for ref in report.trained_refs]
        # Version n is what step n made of version n - 1, the weights that its trajectories' ages are counted from.
        ages = self.trajectories.fates.trained(positions, report.step, report.version.number - 1)
        self.trajectories.staleness.add(ages)
        self._phases(report)
        if report.step % EVENT_EVERY_STEPS == 0:
            reward = report.metrics.get("reward")
            told = "" if reward is None else f", reward {reward:.3f}"
            self.log.add(report.sent_at, "info", f"step {report.step}{told}")

    def _phases(self, report: StepReport) -> None:
        # A report tells how long each phase took, not when; they are drawn back to back, up to the report.
        track, seconds = self._track(TRAINER), [(kind, report.metrics.get(key, 0.0)) for kind, key in PHASES]
        at = report.sent_at - sum(taken for _, taken in seconds)  # the report is sent when the last phase is over
        for kind, taken in seconds:
            track.extend(at, at + taken, kind, report.step)
            at += taken
        track.mark(report.sent_at, "step", f"step {report.step}")

    def _refused(self, report: RefusedStep) -> None:
        if report.policy != policy_in(self.run):
            return
        self.log.add(report.sent_at, "bad", f"step {report.step} refused: {report.problem[:160]}")
        self._track(TRAINER).mark(report.sent_at, "refused", f"step {report.step} refused")

    def _skip(self, row: SkipRecord) -> None:
        # One row may tell of a whole range, such as what retention deleted.
        count = max(1, row.end - row.offset)
        self.refusals.skips.add(row.lineage, row.sent_at, row.reason.value, count)
        if row.reason in CAUSED:
            # Of rewards and of bytes the detail does not say whose they were.
            where = row.trajectory_id if row.reason is SkipReason.POISON else None
            self.refusals.skip_causes.setdefault(row.reason.value, SkipCauses()).add(row.detail, where, count)
        self.trajectories.fates.settle((row.partition, row.offset), f"skipped: {row.reason.value}")
        reason = row.reason.value.replace("_", " ")
        self.log.add(row.sent_at, "warn", f"trajectories skipped at step {row.step}: {reason}", count)

    def _evaluated(self, report: EvaluationReport) -> None:
        if self.learning.evaluations.add(report):
            passed = f"pass@1 {self.learning.evaluations.pass_at_1 or 0.0:.3f}"
            self.log.add(report.sent_at, "info", f"weights {report.version} evaluated: {passed}")

    def _weights(self, message: WeightsReady) -> None:
        self.progress.announced = max(self.progress.announced, message.version)
        # Of a step whose report is still to come: a finished run is continued.
        if message.version > self.progress.version:
            self.progress.finished = False
        self.processes.rates["weights"].add(message.sent_at)
        self._track(COORDINATOR).mark(message.sent_at, "announce", f"weights {message.version} announced")

    def _flow(self, message: FlowControl) -> None:
        # It is announced again to every worker that joins.
        if message.mode != self.progress.mode:
            said = {"run": "the run goes on", "pause": "the run is paused", "drain": "the run is drained"}[message.mode]
            level = "good" if message.mode == "run" else "warn"
            self.log.add(message.sent_at, level, f"{said} ({message.reason})" if message.reason else said)
            self._track(COORDINATOR).mark(message.sent_at, message.mode, said)
        self.progress.mode = message.mode

    def _drain(self, message: DrainWorker) -> None:
        self.log.add(message.sent_at, "warn", f"{message.worker_id} is asked to leave: {message.reason or 'no reason'}")

    def _finish(self, message: RunFinished) -> None:
        # The last word of the coordinator; a run that is continued takes it back.
        self.progress.finished, self.progress.finished_step = True, message.step
        self.log.add(message.sent_at, "good", f"the run is finished at step {message.step}: {message.reason}")


def is_alive(beat: Heartbeat, now: float) -> bool:
    """Whether this worker has neither left nor fallen silent, by its last heartbeat."""
    return beat.state is not WorkerState.STOPPED and now - beat.sent_at <= SILENT_AFTER_S


def _sent_to(beat: Heartbeat) -> int:
    return beat.finished_trajectories + beat.running + beat.waiting


def lag_by_bucket(metrics: Mapping[str, float]) -> dict[int, int]:
    """Trajectories not finished, by length bucket, as the trainer reported them with a step."""
    return by_bucket(metrics, LAG_PREFIX)


def by_bucket(metrics: Mapping[str, float], prefix: str) -> dict[int, int]:
    """Counts that the trainer reported with a step for each length bucket."""
    found = {int(key.removeprefix(prefix)): int(value) for key, value in metrics.items() if key.startswith(prefix)}
    return dict(sorted(found.items()))


def by_reason(metrics: Mapping[str, float]) -> dict[str, int]:
    """Trajectories skipped up to a step, as the trainer reported them with it."""
    names = [name for name in metrics if name.startswith(SKIPPED_PREFIX)]
    return {name.removeprefix(SKIPPED_PREFIX): int(metrics[name]) for name in names}


def _name_of(record: Record) -> str:
    return record.topic.rpartition(".")[2]
