"""Turns step reports and heartbeats into balances, and balances into a wanted number of workers. Pure; knows no topics.

A step's time is the trainer's own: what it did not wait is training. Where generation and training overlap, generation
is the longer stage while the trainer waits, and then it takes the whole step; otherwise it takes the share of the step
in which the workers' slots were busy. Where they do not overlap, generation is what the trainer waits for.
"""

from dataclasses import dataclass, field

from coordinator.scaling.rule import Balance, Bounds, Decision, Rule
from coordinator.scaling.settings import ScalingSettings
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import Heartbeat, StepReport, WorkerState

NO_VERSION = PolicyVersion(0, 0)
WAITING = 0.05
"""Share of a step that the trainer must wait for generation to be the longer stage."""


@dataclass
class FleetWatch:
    """``wanted``: workers asked for last. ``overlaps``: whether generation goes on while a step is trained.

    A change is judged again once the wanted workers are there, and ``settle_steps`` whole steps have passed.
    """

    bounds: Bounds
    settings: ScalingSettings
    overlaps: bool
    wanted: int
    _rule: Rule = field(init=False)
    _ready: dict[str, bool] = field(default_factory=dict)
    _occupied: list[float] = field(default_factory=list)
    _newest: PolicyVersion = NO_VERSION
    _settled: int = 0

    def __post_init__(self) -> None:
        self.wanted = self.bounds.nearest(self.wanted)
        self._rule = Rule(self.bounds, self.settings)

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

    def stepped(self, report: StepReport) -> Decision | None:
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

    def _balance(self, report: StepReport, occupied: float) -> Balance | None:
        step_s, waited_s = report.metrics.get("time/step"), report.metrics.get("time/wait_for_batch", 0.0)
        if not step_s:
            return None
        overlapping_s = step_s if waited_s >= WAITING * step_s else step_s * occupied
        generate_s = overlapping_s if self.overlaps else waited_s
        return Balance(generate_s, step_s - waited_s, self.workers, generate_s / (self.workers + 1))
