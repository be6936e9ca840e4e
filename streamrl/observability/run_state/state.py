"""The present state of a run, folded from its topics. All displays, `status` and the summary show it.

Pure: time comes with the records. What a record means for the run is decided only here, and in ``inspection.audit``,
which checks the accounts of a whole run. Invariants, each with a test of its name:
- the_state_stays_bounded: however many records come, the size of the state has an upper limit;
- repeated_steps_replace_older_ones: if a resumed trainer takes steps again, the newer ones count;
- every_trajectory_is_counted: trajectories count even if very many come at once and only some are decoded.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from cachetools import FIFOCache

from streamrl.bus.port import Record
from streamrl.observability.run_state.aggregates import (
    LAG_PREFIX,
    NO_VERSION,
    Curves,
    EventLog,
    LengthCalibration,
    Rate,
    RecordPosition,
    StalenessHistogram,
    StepEntry,
    StepHistory,
    Track,
    TrajectoryFates,
)
from streamrl.observability.run_state.evaluations import EvaluationHistory
from streamrl.observability.run_state.parts import RunPart
from streamrl.observability.run_state.rewards import RewardHistory
from streamrl.observability.run_state.skips import EXAMPLE_LIMIT, SkipCauses, SkipCounts
from streamrl.observability.run_state.stalls import first_step_waits_for, waiting_for
from streamrl.observability.run_state.trajectory_summary import NEWEST, TrajectorySummary, sampled, summary_of
from streamrl.schemas.control import DrainWorker, FlowControl, RunFinished, WeightsReady
from streamrl.schemas.errors import WireError
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion, policy_in
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import (
    Heartbeat,
    RefusedStep,
    ResourceUsage,
    SkipReason,
    SkipRecord,
    StepReport,
    WorkerState,
)
from streamrl.schemas.starts import RunStart
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES

SILENT_AFTER_S = 10.0
"""Seconds without a heartbeat after which displays show a worker as dead; heartbeats come every second."""
FINISHED_PREFIX = "kafka/finished/bucket_"
SKIPPED_PREFIX = "ledger/skipped/"
SHOWN_TRAJECTORIES, SHOWN_UNDECIDED = NEWEST, NEWEST // 4
"""Most trajectories in a list, and how many of them at least may still wait for their fate."""
SHOWN_OF_GROUP = 2
DECIDED_KEPT = 400
"""Trajectories with a known fate to choose from: a usual step's, so that the list shows many of its prompts."""
_DIGITS = re.compile(r"\d")
STALL_S = 120.0
"""Default of ``run.stall_s``, for runs whose settings are unknown."""
STALLED_STEPS = 5
"""Usual steps that must have had time before a warning says what the run waits for: a slow run is not stalled."""
STALLED_SKIPS, SKIPPING_S = 100, 10.0
"""If so many trajectories were skipped since the last step, the warning comes after fewer seconds and says why."""
FLAT_STEPS = 10
"""Steps in a row without any difference between rewards after which a warning says so."""
UNDECIDED_KEPT = 2000
"""Trajectories to remember until their fate is known: a few steps of a usual run, and about a megabyte."""
WORKERS_HELD = 256
MOST_BUCKETS = 64
EVENT_EVERY_STEPS = 10
AWAY_S = 15.0
"""Seconds without a read after which the broker counts as down."""
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
"""The parts of the reward, by reward function."""
PHASES = (
    ("wait", "time/wait_for_batch"),
    ("train", "time/forward_backward"),
    ("optimizer", "time/optimizer"),
    ("checkpoint", "time/save_ckpt"),
    ("publish", "time/broadcast_weights"),
)
"""The phases of a step, in the order of drawing, and the metrics with their durations."""
CAUSED = frozenset({SkipReason.POISON, SkipReason.REFUSED, SkipReason.OUT_OF_MEMORY})
"""Reasons whose details start, before the first colon, with a cause that many rows share."""
TRAINER, COORDINATOR = "trainer", "coordinator"


def _rates() -> dict[str, Rate]:
    # Weights come one per step, so their rate needs a longer window.
    return {"ordered": Rate(), "sampled": Rate(), "weights": Rate(60.0)}


@dataclass
class RunProgress:
    """The progress of the run, and its mode.

    ``version``, ``step``: the newest reported ones; ``step_at``: when they were reported. ``announced``: the newest
    weights announced to workers. ``planned_steps``, ``step_trajectories``: the run's number of steps, and of
    trajectories in a step, by its settings; None: not known.
    ``finished_step``: the last step at which the coordinator ended the run, even if it continued; -1: it never did.
    ``ended``: none of its processes runs, finished or not; only files tell that.
    """

    algorithm: str = ""
    version: PolicyVersion = NO_VERSION
    announced: PolicyVersion = NO_VERSION
    step: int = 0
    step_at: float | None = None
    planned_steps: int | None = None
    step_trajectories: int | None = None
    mode: str = "run"
    finished: bool = False
    finished_step: int = -1
    ended: bool = False


@dataclass
class LearningHistory:
    """The metrics of optimizer steps and evaluations."""

    steps: StepHistory = field(default_factory=StepHistory)
    curves: Curves = field(default_factory=lambda: Curves(CURVES, families=CURVE_FAMILIES))
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)


@dataclass
class ProcessActivity:
    """The run's processes and their activities.

    ``workers``: the last heartbeat of each; ``silent``: silent workers. ``trainer``: what the trainer's process used
    last. ``starts``: the run's starts, as far as they are known.
    """

    workers: dict[str, Heartbeat] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    tracks: dict[str, Track] = field(default_factory=dict)
    trainer: ResourceUsage | None = None
    starts: Sequence[RunStart] = ()
    rates: dict[str, Rate] = field(default_factory=_rates)


@dataclass
class SampledTrajectories:
    """The trajectories on the topic, and their fates.

    ``last``: the newest. ``undecided``: those that wait for a fate. ``decided``: those whose fate became known last; in
    a fast run that is seconds after their record, when ``last`` has only newer ones. ``buckets``: counts by length
    bucket. ``bucket_of``: length buckets by partition. ``ends``: sums of the partitions' end offsets, by length bucket;
    empty if they are not looked up.
    """

    last: deque[TrajectorySummary] = field(default_factory=lambda: deque(maxlen=SHOWN_TRAJECTORIES))
    decided: deque[TrajectorySummary] = field(default_factory=lambda: deque(maxlen=DECIDED_KEPT))
    undecided: FIFOCache[RecordPosition, TrajectorySummary] = field(default_factory=lambda: FIFOCache(UNDECIDED_KEPT))
    buckets: Counter[int] = field(default_factory=Counter)
    bucket_of: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    calibration: LengthCalibration = field(default_factory=LengthCalibration)
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)
    fates: TrajectoryFates = field(default_factory=TrajectoryFates)
    rewards: RewardHistory = field(default_factory=RewardHistory)

    def arrived(self, summary: TrajectorySummary) -> None:
        """Note a trajectory whose fate is not known yet."""
        position = summary.partition, summary.offset
        self.last.append(summary)
        self.undecided[position] = summary
        self.fates.arrived(position, summary.aged_from)

    def decide(self, positions: Iterable[RecordPosition]) -> None:
        """Note that the fates of these trajectories became known."""
        found = (self.undecided.pop(position, None) for position in positions)
        self.decided.extend(summary for summary in found if summary is not None)

    def listed(self) -> list[TrajectorySummary]:
        """The trajectories that a display lists: those whose fate became known last, a few of a group, then the newest.

        All samples of a step are decided at once, so that without a limit the list would show a few prompts only.
        """
        of_group: Counter[str] = Counter()
        found: list[TrajectorySummary] = []
        for summary in reversed(self.decided):
            of_group[summary.group_id] += 1
            if of_group[summary.group_id] <= SHOWN_OF_GROUP:
                found.append(summary)
        newest = dict.fromkeys((*found[: SHOWN_TRAJECTORIES - SHOWN_UNDECIDED], *reversed(self.last)))
        return list(newest)[:SHOWN_TRAJECTORIES]


@dataclass
class RecordRefusals:
    """Records that were not trained.

    ``skip_causes``: by reason, the shared causes of skips that a user may want to act on. ``since_step``: trajectories
    skipped after the newest step, by reason; ``latest``: the detail of the last of them. ``dead_letters``: the number
    of records on that topic.
    """

    skips: SkipCounts = field(default_factory=SkipCounts)
    skip_causes: dict[str, SkipCauses] = field(default_factory=dict)
    since_step: Counter[str] = field(default_factory=Counter)
    latest: str = ""
    dead_letters: int = 0


@dataclass
class RunState:
    """The state of a run. ``run_state.figures`` has its figures, and ``run_state.snapshot`` all of it as plain data.

    ``reward_weights``: weights of the run's reward functions, as far as they are known; the default is 1. ``parts``:
    the parts of optional features. ``stall_s``: seconds without a step after which a warning says what the run waits
    for. ``read_at``: when the topics were last read to their ends, in epoch seconds.
    """

    run: str
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[RunPart, ...] = ()
    stall_s: float = STALL_S
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
        """The metrics of the newest step."""
        newest = self.learning.steps.newest
        return {} if newest is None else newest.metrics

    @property
    def lag(self) -> dict[int, int]:
        """Trajectories on the topic that the trainer has neither trained nor skipped, by length bucket.

        That is the newest step's report plus those that came since; before the first step, all that came.
        """
        return lag_at(self.metrics, self.trajectories.ends)

    @property
    def skipped(self) -> dict[str, int]:
        """Trajectories skipped since the run's start, by reason, without skips that a crash undid."""
        return self.refusals.skips.counts()

    @property
    def max_steps(self) -> int | None:
        """The number of optimizer steps after which the run ends."""
        reported = self.metrics.get("progress/max_steps")
        return self.progress.planned_steps if reported is None else int(reported)

    def before_first_step(self, now: float) -> str | None:
        """What the run waits for before its first step; None after it, also for a trainer that was started again."""
        newest, progress = self.learning.steps.newest, self.progress
        if newest is not None and newest.version.lineage == progress.version.lineage:
            return None
        is_ready, skipped = progress.step_at is not None, self.refusals.since_step.total()
        # Before the first step the lag counts skipped ones too; topics are read one after another.
        sampled = max(0, sum(self.lag.values()) - skipped)
        return first_step_waits_for(is_ready, self.living_workers(now), sampled, progress.step_trajectories, skipped)

    def living_workers(self, now: float) -> list[Heartbeat]:
        """The last heartbeats of the living workers, sorted by id."""
        return [beat for _, beat in sorted(self.processes.workers.items()) if is_alive(beat, now)]

    def known_until(self, now: float) -> float:
        """The time that displays refer to: the last read of the topics, or ``now`` if the last read is too old."""
        return now if self.read_at is None or now - self.read_at > AWAY_S else min(now, self.read_at)

    def note_ends(self, ends: Mapping[int, int]) -> None:
        """Note the sums of the trajectories' end offsets by length bucket, which the lag counts from."""
        self.trajectories.ends = dict(ends)
        for part in self.parts:
            part.note_ends(ends)

    def observe_records(self, records: Sequence[Record]) -> None:
        """Take records that came at once into account, sorted by time stamp.

        Of very many trajectories only some are decoded; all are counted.
        """
        trajectories = [index for index, record in enumerate(records) if _name_of(record) == TRAJECTORIES.name]
        not_decoded = set(trajectories) - sampled(trajectories)
        for index, record in enumerate(records):
            # Each partition belongs to one bucket, so the bucket is known without decoding the record.
            if index in not_decoded and record.partition in self.trajectories.bucket_of:
                self._count_trajectory(record.timestamp, self.trajectories.bucket_of[record.partition])
            else:
                self.observe_record(record)

    def observe_record(self, record: Record) -> None:
        """Take a record of one of the run's topics into account. Dead letters are counted, not decoded."""
        name = _name_of(record)
        if name == TRAJECTORIES.name:
            if (summary := summary_of(record, self.reward_weights)) is not None:
                self.observe_trajectory(summary, record.timestamp)
        # Dead letters are not decoded: their bytes failed to decode before.
        elif name == DEAD_LETTERS.name:
            self.refusals.dead_letters += 1
            self.log.add(record.timestamp, "bad", "a record was refused; see dead letters")
        else:
            # The processes that act on a record report it if it does not decode; a display ignores it.
            with suppress(WireError):
                self.observe_message(record.message())

    def observe_trajectory(self, summary: TrajectorySummary, at: float) -> None:
        """Take a trajectory into account. ``at``: when its record was written."""
        # The record's writer may have written any number.
        bucket = self.trajectories.bucket_of[summary.partition] = min(summary.bucket, MOST_BUCKETS - 1)
        self._count_trajectory(at, bucket)
        self.trajectories.calibration.add(summary.predicted, summary.length)
        self.trajectories.rewards.add(summary.group_id, summary.reward, solved=summary.solved)
        self.trajectories.arrived(summary)
        for part in self.parts:
            part.sampled(summary)
        if (track := self._worker_track(summary.worker_id)) is not None:
            track.extend(summary.started_at, summary.finished_at, "generate", summary.newest.number)

    def _count_trajectory(self, at: float, bucket: int) -> None:
        self.processes.rates["sampled"].add(at)
        self.trajectories.buckets[bucket] += 1

    def observe_message(self, message: Message) -> None:
        """Take a decoded message into account. Messages without news for the run's state are ignored."""
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
        """Notice workers that have become silent, and new warnings."""
        for worker, beat in self.processes.workers.items():
            silent = beat.state is not WorkerState.STOPPED and not is_alive(beat, now)
            if silent and worker not in self.processes.silent and not self.progress.finished:
                self.processes.silent.add(worker)
                self.log.add(now, "bad", f"{worker} is silent: no heartbeat for {SILENT_AFTER_S:.0f} s")
        warning = self.warning(now)
        # Figures in a warning may grow from one tick to the next: that is no new warning.
        if warning is not None and (self._warned is None or _DIGITS.sub("", warning) != _DIGITS.sub("", self._warned)):
            self.log.add(now, "bad", warning)
        self._warned = warning

    def track(self, name: str) -> Track:
        """The track of a process."""
        return self.processes.tracks.setdefault(name, Track())

    def _worker_track(self, worker: str) -> Track | None:
        """The track of a worker; None if there are too many workers."""
        if worker in self.processes.tracks or len(self.processes.tracks) < WORKERS_HELD:
            return self.track(worker)
        return None

    def _heartbeat(self, beat: Heartbeat) -> None:
        before = self.processes.workers.get(beat.worker_id)
        # Names of workers come from outside: without a limit, made-up names would fill the memory.
        if before is None and len(self.processes.workers) >= WORKERS_HELD:
            return
        self.processes.workers[beat.worker_id] = beat
        track = self.track(beat.worker_id)
        if beat.worker_id in self.processes.silent:
            self.processes.silent.discard(beat.worker_id)
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} is heard again")
        if before is None:
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} joined: {beat.engine}, {beat.capacity} at once")
            return
        if beat.state is not before.state:
            level = "warn" if beat.state in (WorkerState.DRAINING, WorkerState.STOPPED) else "info"
            self.log.add(beat.sent_at, level, f"{beat.worker_id} is {beat.state.value}")
        if beat.incarnation != before.incarnation:
            self._new_incarnation(beat, before)
        if beat.incarnation == before.incarnation:
            # A worker has finished or still holds all that it was sent.
            self.processes.rates["ordered"].add(beat.sent_at, max(0, _sent_to(beat) - _sent_to(before)))
            # Between two heartbeats of one process, it generated if it was running completions at the first.
            if before.running and beat.sent_at - before.sent_at < SILENT_AFTER_S:
                track.extend(before.sent_at, beat.sent_at, "generate", before.version.number)
        if beat.weights != before.weights:
            track.mark(beat.sent_at, "adopt", f"weights {beat.weights}")

    def _new_incarnation(self, beat: Heartbeat, before: Heartbeat) -> None:
        """Note a worker that was started again: alone after it was lost, which is marked, or otherwise."""
        has_left = before.state is WorkerState.STOPPED or self._start_between(before.sent_at, beat.sent_at) is not None
        if has_left:
            self.log.add(beat.sent_at, "good", f"{beat.worker_id} joined again")
        else:
            self.log.add(beat.sent_at, "warn", f"{beat.worker_id} was started again", mark="restart")

    def _start_between(self, after: float, until: float) -> RunStart | None:
        return next((start for start in reversed(self.processes.starts) if after < start.at <= until), None)

    @property
    def own_trainer_leads(self) -> bool:
        """Whether the run ends with the last step of its own trainer."""
        return all(part.own_trainer_leads for part in self.parts)

    def warning(self, now: float) -> str | None:
        """One line that tells a user what to do; None: nothing."""
        if self.progress.finished:
            return None
        warnings = (part.warning(now) for part in self.parts)
        told = next((text for text in warnings if text is not None), None)
        return told or self._stall_warning(now) or self._reward_warning()

    def _stall_warning(self, now: float) -> str | None:
        """Why no step is taken: all trajectories are skipped, or what the run waits for."""
        skipped, step_at = self.refusals.since_step, self.progress.step_at
        pace = self.learning.steps.pace().steps_per_s
        if step_at is None or now - step_at < (STALLED_STEPS / pace if pace else 0.0):
            return None
        if skipped.total() < STALLED_SKIPS:
            if now - step_at < self.stall_s:
                return None
            cause = waiting_for(self.progress.mode, self.living_workers(now), sum(self.lag.values()))
            return f"no step for {now - step_at:.0f} s: {cause}"
        if now - step_at < SKIPPING_S:
            return None
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in skipped.most_common())
        return f"no step for {now - step_at:.0f} s, trajectories skipped since: {reasons}; {self.refusals.latest}"

    def _reward_warning(self) -> str | None:
        newest = [*islice(reversed(self.learning.steps.entries), FLAT_STEPS)]
        if len(newest) < FLAT_STEPS or any(step.metrics.get("frac_reward_zero_std") != 1.0 for step in newest):
            return None
        return f"in the last {FLAT_STEPS} steps all samples of each prompt had equal rewards: nothing is learned"

    def _step(self, report: StepReport) -> None:
        if report.policy != policy_in(self.run):
            return
        # A replaced trainer may still have written reports: only the newest lineage counts.
        progress = self.progress
        if report.version < progress.version:
            return
        self.log.step = report.step
        if progress.version != NO_VERSION and report.version.lineage != progress.version.lineage:
            self._new_lineage(report, progress.step_at or 0.0)
        if self.own_trainer_leads:
            progress.finished = report.finished
        elif report.version.lineage != progress.version.lineage:
            progress.finished = False  # the run continues; while another policy is served, its last step ends nothing
        if report.parent is not None:
            self.learning.evaluations.start_lineage(report.version.lineage, report.parent)
        progress.version, progress.algorithm = report.version, report.algorithm
        progress.step, progress.step_at = report.step, report.sent_at
        self.processes.trainer = report.usage or self.processes.trainer
        taken = self.learning.steps.add(report)
        self.refusals.skips.report(report.version.lineage, report.sent_at, by_reason(self.metrics))
        if not taken:
            return
        self._draw_step(report.step, report.sent_at, report.metrics)
        positions = [(ref.partition, ref.offset) for ref in report.trained_refs]
        # Step n makes version n from version n - 1, from which its trajectories' ages are counted.
        ages = self.trajectories.fates.trained(positions, report.step, report.version.number - 1)
        self.trajectories.staleness.add(ages)
        self.trajectories.decide(positions)
        self.refusals.since_step.clear()
        self._phases(report)

    def take_step(self, entry: StepEntry) -> None:
        """Take a step from the trainer's file into account; steps come in their order."""
        self.progress.version, self.progress.announced = entry.version, entry.version
        self.progress.step, self.progress.step_at, self.log.step = entry.step, entry.sent_at, entry.step
        self.learning.steps.append(entry)
        self._draw_step(entry.step, entry.sent_at, entry.metrics)

    def _draw_step(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self.learning.curves.add(step, metrics)
        if step % EVENT_EVERY_STEPS == 0:
            reward = metrics.get("reward")
            suffix = "" if reward is None else f", reward {reward:.3f}"
            self.log.add(at, "info", f"step {step}{suffix}")

    def _new_lineage(self, report: StepReport, before: float) -> None:
        """Note a trainer that continues, with the whole run or alone. ``before``: time of the last report before it."""
        started = self._start_between(before, report.sent_at)
        if started is None:
            self.log.add(report.sent_at, "warn", f"a new trainer continues from step {report.step}", mark="restart")
        else:
            text, kind = started.mark()
            self.log.add(report.sent_at, "info", text, mark=kind)

    def _phases(self, report: StepReport) -> None:
        # A report has the durations of phases, not their times: they are drawn back to back, up to the report.
        track, seconds = self.track(TRAINER), [(kind, report.metrics.get(key, 0.0)) for kind, key in PHASES]
        at = report.sent_at - sum(taken for _, taken in seconds)  # the report is sent after the last phase
        for kind, taken in seconds:
            track.extend(at, at + taken, kind, report.step)
            at += taken
        track.mark(report.sent_at, "step", f"step {report.step}")

    def _refused(self, report: RefusedStep) -> None:
        if report.policy != policy_in(self.run):
            return
        self.log.add(report.sent_at, "bad", f"step {report.step} refused: {report.problem[:160]}")
        self.track(TRAINER).mark(report.sent_at, "refused", f"step {report.step} refused")

    def _skip(self, row: SkipRecord) -> None:
        # One row may cover a whole range of offsets, for example if retention deleted them.
        count = max(1, row.end - row.offset)
        self.refusals.skips.add(row.lineage, row.sent_at, row.reason.value, count)
        if row.reason in CAUSED:
            # Details of poisoned trajectories do not name the trajectory, so the example does.
            where = row.trajectory_id if row.reason is SkipReason.POISON else None
            self.refusals.skip_causes.setdefault(row.reason.value, SkipCauses()).add(row.detail, where, count)
        self.trajectories.fates.settle((row.partition, row.offset), f"skipped: {row.reason.value}")
        self.trajectories.decide([(row.partition, row.offset)])
        self.refusals.since_step[row.reason.value] += count
        self.refusals.latest = f"{row.group_id or row.trajectory_id or 'a record'}: {row.detail[:EXAMPLE_LIMIT]}"
        reason = row.reason.value.replace("_", " ")
        self.log.add(row.sent_at, "warn", f"trajectories skipped at step {row.step}: {reason}", count)

    def _evaluated(self, report: EvaluationReport) -> None:
        if self.learning.evaluations.add(report):
            passed = f"pass@1 {self.learning.evaluations.pass_at_1 or 0.0:.3f}"
            self.log.add(report.sent_at, "info", f"weights {report.version} evaluated: {passed}")

    def _weights(self, message: WeightsReady) -> None:
        self.progress.announced = max(self.progress.announced, message.version)
        # Weights newer than the last report mean that a finished run continues.
        if message.version > self.progress.version:
            self.progress.finished = False
        self.processes.rates["weights"].add(message.sent_at)
        self.track(COORDINATOR).mark(message.sent_at, "announce", f"weights {message.version} announced")

    def _flow(self, message: FlowControl) -> None:
        # The same mode may be announced again.
        if message.mode != self.progress.mode:
            text = {"run": "the run goes on", "pause": "the run is paused", "drain": "the run is drained"}[message.mode]
            level = "good" if message.mode == "run" else "warn"
            self.log.add(message.sent_at, level, f"{text} ({message.reason})" if message.reason else text)
            self.track(COORDINATOR).mark(message.sent_at, message.mode, text)
        self.progress.mode = message.mode

    def _drain(self, message: DrainWorker) -> None:
        self.log.add(message.sent_at, "warn", f"{message.worker_id} is asked to leave: {message.reason or 'no reason'}")

    def _finish(self, message: RunFinished) -> None:
        # The coordinator's last announcement, unless the run is continued.
        self.progress.finished, self.progress.finished_step = True, message.step
        self.log.add(message.sent_at, "good", f"the run is finished at step {message.step}: {message.reason}")


def is_alive(beat: Heartbeat, now: float) -> bool:
    """Whether a worker has neither left nor become silent, by its last heartbeat."""
    return beat.state is not WorkerState.STOPPED and now - beat.sent_at <= SILENT_AFTER_S


def _sent_to(beat: Heartbeat) -> int:
    return beat.finished_trajectories + beat.running + beat.waiting


def lag_at(metrics: Mapping[str, float], ends: Mapping[int, int]) -> dict[int, int]:
    """The unfinished trajectories by length bucket: those of a step's report, and those that came since.

    ``ends``: the topic's ends by bucket; empty if they are not looked up.
    """
    reported, finished = lag_by_bucket(metrics), by_bucket(metrics, FINISHED_PREFIX)
    if not ends or (reported and not finished):  # an older version's reports have only the lag
        return reported
    buckets = sorted({*reported, *ends})
    # The maximum, since the trainer may have read the ends later than we did.
    return {bucket: max(ends.get(bucket, 0) - finished.get(bucket, 0), reported.get(bucket, 0)) for bucket in buckets}


def lag_by_bucket(metrics: Mapping[str, float]) -> dict[int, int]:
    """The unfinished trajectories by length bucket, as the trainer reported them with a step."""
    return by_bucket(metrics, LAG_PREFIX)


def by_bucket(metrics: Mapping[str, float], prefix: str) -> dict[int, int]:
    """A step's metrics with this prefix, which are counts by length bucket."""
    found = {int(key.removeprefix(prefix)): int(value) for key, value in metrics.items() if key.startswith(prefix)}
    return dict(sorted(found.items()))


def by_reason(metrics: Mapping[str, float]) -> dict[str, int]:
    """The trajectories skipped up to a step, by reason, as the trainer reported them with it."""
    names = [name for name in metrics if name.startswith(SKIPPED_PREFIX)]
    return {name.removeprefix(SKIPPED_PREFIX): int(metrics[name]) for name in names}


def _name_of(record: Record) -> str:
    return record.topic.rpartition(".")[2]
