"""Turns step reports and heartbeats into balances, and balances into a wanted number of workers. Pure; knows no topics.

A step's time is the trainer's own: what it did not wait is training. Where generation and training overlap, generation
is the longer stage while the trainer waits, and then it takes the whole step; otherwise it takes the share of the step
in which the workers' slots were busy. Where they do not overlap, generation is what the trainer waits for.
"""

from dataclasses import dataclass, field

from coordinator.settings import ScalingSettings
from schemas.identifiers import PolicyVersion
from schemas.reports import Heartbeat, StepReport, WorkerState

# When a worker is added and when one leaves (StreamRL, 2025, section 4.2, dynamic adjustment). Pure. delta = seconds
# that generation of a step takes longer than its training. One more worker is wanted once delta is at least what it
# is predicted to save; the paper only adds. One leaves when generation would still be the shorter stage without it,
# by a margin and for several steps in a row. Invariants:
# a_worker_is_added_only_when_it_saves_no_more_than_is_missing; what_was_added_does_not_leave_at_once.


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One optimizer step with so many workers, in seconds; ``gain_s``: what one more is predicted to save."""

    generate_s: float
    train_s: float
    workers: int
    gain_s: float

    @property
    def delta_s(self) -> float:
        """By how much generation is the longer stage."""
        return self.generate_s - self.train_s

    @property
    def with_one_fewer_s(self) -> float:
        """Generation if all of it were shared by one worker fewer."""
        return self.generate_s * self.workers / (self.workers - 1) if self.workers > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class FleetBounds:
    """Fewest and most workers."""

    fewest: int
    most: int

    def nearest(self, workers: int) -> int:
        """The allowed number that is nearest."""
        return max(self.fewest, min(self.most, workers))


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """So many workers are wanted from now on."""

    workers: int
    reason: str


@dataclass
class ScalingRule:
    """Judges steps one after the other."""

    bounds: FleetBounds
    settings: ScalingSettings
    _spare_steps: int = field(default=0, init=False)

    def judge(self, balance: StageTimes) -> ScalingDecision | None:
        """What follows from a step; none if nothing changes."""
        spare = balance.with_one_fewer_s <= balance.train_s * (1 - self.settings.margin)
        self._spare_steps = self._spare_steps + 1 if spare else 0
        if balance.workers < self.bounds.most and balance.delta_s >= balance.gain_s > 0:
            return self._decided(
                balance, 1, f"saves {balance.gain_s:.1f} s of the {balance.delta_s:.1f} s that are missing"
            )
        if balance.workers > self.bounds.fewest and self._spare_steps >= self.settings.idle_steps:
            return self._decided(
                balance, -1, f"without it {balance.with_one_fewer_s:.1f} s, training takes {balance.train_s:.1f} s"
            )
        return None

    def _decided(self, balance: StageTimes, change: int, why: str) -> ScalingDecision:
        self._spare_steps = 0
        act = "one more worker" if change > 0 else "one worker fewer"
        return ScalingDecision(balance.workers + change, f"generation takes {balance.generate_s:.1f} s; {act}: {why}")


NO_VERSION = PolicyVersion(0, 0)
WAITING = 0.05
"""Share of a step that the trainer must wait for generation to be the longer stage."""


@dataclass
class FleetWatch:
    """``wanted``: workers asked for last. ``overlaps``: whether generation goes on while a step is trained.

    A change is judged again once the wanted workers are there, and ``settle_steps`` whole steps have passed.
    """

    bounds: FleetBounds
    settings: ScalingSettings
    overlaps: bool
    wanted: int
    _rule: ScalingRule = field(init=False)
    _ready: dict[str, bool] = field(default_factory=dict)
    _occupied: list[float] = field(default_factory=list)
    _newest: PolicyVersion = NO_VERSION
    _settled: int = 0

    def __post_init__(self) -> None:
        self.wanted = self.bounds.nearest(self.wanted)
        self._rule = ScalingRule(self.bounds, self.settings)

    @property
    def workers(self) -> int:
        """Workers that take orders."""
        return sum(self._ready.values())

    def heard(self, heartbeat: Heartbeat) -> None:
        """A worker said how it is."""
        ready = heartbeat.state is WorkerState.READY
        self._ready[heartbeat.worker_id] = ready
        if ready and heartbeat.capacity:
            self._occupied.append(heartbeat.running / heartbeat.capacity)

    def lost(self, worker_id: str) -> None:
        """A worker is silent."""
        self._ready[worker_id] = False

    def stepped(self, report: StepReport) -> ScalingDecision | None:
        """A step was taken; what is wanted now, if that changes."""
        occupied, self._occupied = self._occupied, []
        if report.version <= self._newest or not report.group_ids:
            return None
        is_first, self._newest = self._newest.lineage != report.version.lineage, report.version
        if is_first or self.workers != self.wanted:
            self._settled = 0
            return None
        self._settled += 1
        balance = self._balance(report, sum(occupied) / len(occupied) if occupied else 1.0)
        if self._settled <= self.settings.settle_steps or balance is None:
            return None
        decision = self._rule.judge(balance)
        if decision is not None:
            self.wanted, self._settled = decision.workers, 0
        return decision

    def _balance(self, report: StepReport, occupied: float) -> StageTimes | None:
        step_s, waited_s = report.metrics.get("time/step"), report.metrics.get("time/wait_for_batch", 0.0)
        if not step_s:
            return None
        overlapping_s = step_s if waited_s >= WAITING * step_s else step_s * occupied
        generate_s = overlapping_s if self.overlaps else waited_s
        return StageTimes(generate_s, step_s - waited_s, self.workers, generate_s / (self.workers + 1))
