"""Decides how many workers are wanted: more while generation is the longer stage, fewer while it has time to spare.

The rule is StreamRL's dynamic adjustment (arXiv:2504.15930, section 4.2). generate_s and train_s are the seconds that
the two stages of one step take:

    delta_s = generate_s - train_s         by how much generation is longer
    gain_s  = generate_s / (workers + 1)   what one more worker should save, if work is shared evenly

One more worker is wanted if delta_s >= gain_s. The paper only adds workers. Here a worker also leaves, if generation
would still be the shorter stage without it, by a margin and for several steps in a row. Pure: times come in reports.

Invariants: a_worker_is_added_only_if_it_saves_no_more_than_is_missing; an_added_worker_does_not_leave_at_once.
"""

from dataclasses import dataclass, field

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat, StepReport, WorkerState

NO_VERSION = PolicyVersion(0, 0)
WAITING = 0.05
"""Share of a step that the trainer must wait so that generation counts as the longer stage; less is overhead."""
SETTLE_STEPS = 1
"""Whole steps to ignore after the number of workers changed: the first one has a part with the old number."""
SPARE_MARGIN = 0.15
"""A worker leaves if without it generation takes this share less than training. Smaller margins let workers come and go
with the noise of the times."""
IDLE_STEPS = 3
"""Steps in a row for which the margin must hold before a worker leaves: one short batch is no reason."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that the stages of one optimizer step took. ``gain_s``: what one more worker should save."""

    generate_s: float
    train_s: float
    workers: int
    gain_s: float

    @property
    def delta_s(self) -> float:
        """Seconds by which generation is longer than training."""
        return self.generate_s - self.train_s

    @property
    def with_one_fewer_s(self) -> float:
        """Seconds that generation would take with one worker fewer."""
        return self.generate_s * self.workers / (self.workers - 1) if self.workers > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class FleetBounds:
    """The fewest and most workers allowed."""

    fewest: int
    most: int

    def nearest(self, workers: int) -> int:
        """The allowed number nearest to this one."""
        return max(self.fewest, min(self.most, workers))


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The number of workers wanted from now on, and why."""

    workers: int
    reason: str


@dataclass
class ScalingRule:
    """Decides after each step whether a worker is added or leaves."""

    bounds: FleetBounds
    margin: float = SPARE_MARGIN
    idle_steps: int = IDLE_STEPS
    _spare_steps: int = field(default=0, init=False)

    def decide(self, times: StageTimes) -> ScalingDecision | None:
        """The decision after a step; None if nothing changes."""
        spare = times.with_one_fewer_s <= times.train_s * (1 - self.margin)
        self._spare_steps = self._spare_steps + 1 if spare else 0
        if times.workers < self.bounds.most and times.delta_s >= times.gain_s > 0:
            return self._decided(times, 1, f"saves {times.gain_s:.1f} s of the {times.delta_s:.1f} s that are missing")
        if times.workers > self.bounds.fewest and self._spare_steps >= self.idle_steps:
            return self._decided(
                times, -1, f"without it {times.with_one_fewer_s:.1f} s, training takes {times.train_s:.1f} s"
            )
        return None

    def _decided(self, times: StageTimes, change: int, why: str) -> ScalingDecision:
        self._spare_steps = 0
        act = "one more worker" if change > 0 else "one worker fewer"
        return ScalingDecision(times.workers + change, f"generation takes {times.generate_s:.1f} s; {act}: {why}")


@dataclass
class FleetWatch:
    """Decides from heartbeats and step reports how many workers are wanted.

    ``wanted``: the last number of workers asked for. ``overlaps``: whether generation goes on while a step is trained.
    After a change, the next one waits until the wanted workers are there and ``settle_steps`` whole steps have passed.
    """

    bounds: FleetBounds
    overlaps: bool
    wanted: int
    settle_steps: int = SETTLE_STEPS
    idle_steps: int = IDLE_STEPS
    _rule: ScalingRule = field(init=False)
    _ready: dict[str, bool] = field(default_factory=dict)
    _occupied: list[float] = field(default_factory=list)
    _newest: PolicyVersion = NO_VERSION
    _settled: int = 0

    def __post_init__(self) -> None:
        self.wanted = self.bounds.nearest(self.wanted)
        self._rule = ScalingRule(self.bounds, idle_steps=self.idle_steps)

    @property
    def workers(self) -> int:
        """Number of workers that take orders."""
        return sum(self._ready.values())

    def heard(self, heartbeat: Heartbeat) -> None:
        """Note a worker's heartbeat."""
        ready = heartbeat.state is WorkerState.READY
        self._ready[heartbeat.worker_id] = ready
        if ready and heartbeat.capacity:
            self._occupied.append(heartbeat.running / heartbeat.capacity)

    def lost(self, worker_id: str) -> None:
        """Note that a worker is lost."""
        self._ready[worker_id] = False

    def stepped(self, report: StepReport) -> ScalingDecision | None:
        """Note a step; the decision if the wanted number of workers changes, else None."""
        occupied, self._occupied = self._occupied, []
        # A resumed trainer repeats its last report, and a report without groups is not about a step.
        if report.version <= self._newest or not report.group_ids:
            return None
        is_first, self._newest = self._newest.lineage != report.version.lineage, report.version
        if is_first or self.workers != self.wanted:
            self._settled = 0
            return None
        self._settled += 1
        # If no heartbeat arrived during a short step, slots count as busy, so that no worker is removed.
        times = self._stage_times(report, sum(occupied) / len(occupied) if occupied else 1.0)
        if self._settled <= self.settle_steps or times is None:
            return None
        decision = self._rule.decide(times)
        if decision is not None:
            self.wanted, self._settled = decision.workers, 0
        return decision

    def _stage_times(self, report: StepReport, occupied: float) -> StageTimes | None:
        step_s, waited_s = report.metrics.get("time/step"), report.metrics.get("time/wait_for_batch", 0.0)
        if not step_s:
            return None
        # Training is the part of the step in which the trainer did not wait. If the stages overlap and the trainer
        # waited, generation took the whole step; if it did not wait, the share of the step in which the workers' slots
        # were busy. If the stages do not overlap, generation is the time that the trainer waited.
        overlapping_s = step_s if waited_s >= WAITING * step_s else step_s * occupied
        generate_s = overlapping_s if self.overlaps else waited_s
        gain_s = generate_s / (self.workers + 1)  # g - g w / (w + 1): work shared evenly by one more
        return StageTimes(generate_s, train_s=step_s - waited_s, workers=self.workers, gain_s=gain_s)
