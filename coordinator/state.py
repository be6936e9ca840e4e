"""The coordinator's state: versions, flow and workers; ``coordinator/recovery.py`` rebuilds it. Pure.

A run counts as finished until newer weights are announced after its end: then the run was continued. Both messages
survive compaction, and their order on the topic is the order of the announcements.

Invariants of the version ledger:
- announced_versions_only_grow: an announcement is newer, by (lineage, number), than every earlier one;
- orphans_never_win: weights of an older lineage are never announced after a newer lineage's.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from streamrl.schemas.control import (
    AnnouncedWeights,
    Control,
    FleetTarget,
    FlowControl,
    OperatorCommand,
    RunFinished,
    WeightsReady,
    WorkerClaimed,
)
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.liveness import LastBeats
from streamrl.schemas.reports import Heartbeat, StepReport, WorkerState

FlowMode = Literal["run", "pause", "drain"]

_MODE_AFTER: dict[str, FlowMode] = {"pause": "pause", "resume": "run", "drain": "drain"}
ACTIONS = frozenset({"drain_worker", *_MODE_AFTER})
"""The operator commands that the coordinator itself decides; the others are about policies."""


@dataclass
class CoordinatorState:
    """The state that the control topic gives.

    ``relays``: relays named in the last announcement of weights; None before the first. ``last_command``: offset of the
    last operator command that a message on the topic carried out, -1 before the first. ``next_sequence``: number of the
    next control message.
    """

    ledger: "VersionLedger"
    mode: FlowMode = "run"
    finished: bool = False
    next_sequence: int = 0
    wanted_workers: int | None = None
    claims: dict[str, str] = field(default_factory=dict)
    last_command: int = -1
    relays: frozenset[str] | None = None

    def apply(self, message: Control) -> None:
        """Take one message of the control topic into account."""
        match message:
            case WeightsReady():
                self.relays = frozenset(message.relays)
                # Newer weights mean that a finished run goes on.
                if self.ledger.observe_announcement(message):
                    self.finished = False
            case FlowControl():
                self.mode = message.mode
            case FleetTarget():
                self.wanted_workers = message.workers
            case RunFinished():
                self.finished = True
            case WorkerClaimed():
                self.claims[message.worker_id] = message.incarnation
        # Every message that carries out a command names the command's offset.
        self.last_command = max(self.last_command, getattr(message, "command_offset", -1))
        # Compaction removes messages but keeps their order and the last one: the largest number left is the last given.
        self.next_sequence = max(self.next_sequence, message.sequence + 1)

    def take_number(self) -> int:
        """Take the number for the next control message."""
        self.next_sequence += 1
        return self.next_sequence - 1

    def forget_claim(self, worker: str) -> None:
        """Have the claim on this worker's id announced again."""
        self.claims.pop(worker, None)


@dataclass
class VersionLedger:
    """Reported and announced versions of one policy. Reports carry the versions as they are announced."""

    announced: PolicyVersion | None = None
    latest: StepReport | None = None

    def observe_report(self, report: StepReport) -> bool:
        """Note a step; returns whether it exported weights newer than all others."""
        # No checksum means that this step exported no weights: there is nothing to announce.
        if report.manifest_sha256 is None:
            return False
        if self.latest is not None and report.version <= self.latest.version:
            return False
        self.latest = report
        return True

    def is_newest(self, report: StepReport) -> bool:
        """Whether no weights newer than this report's are known."""
        return self.latest is None or report.version >= self.latest.version

    def forget_reports(self) -> None:
        """Forget all reports: another trainer's follow, with versions above all announced ones."""
        self.latest = None

    def observe_announcement(self, message: AnnouncedWeights) -> bool:
        """Note an announcement, our own or one from the control topic; returns whether it is newer than all others."""
        # Versions are tuples, (lineage, number): 2-101 is above 1-105, whose steps a crash undid.
        if self.announced is not None and message.version <= self.announced:
            return False
        self.announced = message.version
        return True

    def to_announce(self) -> StepReport | None:
        """The report whose weights must be announced now, or None."""
        if self.latest is None or (self.announced is not None and self.latest.version <= self.announced):
            return None
        return self.latest


@dataclass(frozen=True)
class FlowDecision:
    """Set the flow of all workers (``mode``), or let one worker leave (``drain_worker``)."""

    mode: FlowMode | None = None
    drain_worker: str | None = None
    reason: str = ""


def decide(command: OperatorCommand, current: FlowMode, finished: bool) -> FlowDecision | None:
    """The effect of a command in ``ACTIONS``, or None: a finished or draining run cannot be paused or resumed."""
    if command.action == "drain_worker":
        return FlowDecision(drain_worker=command.worker_id, reason=command.reason) if command.worker_id else None
    mode = _MODE_AFTER[command.action]
    # Draining cannot be undone: workers may have left.
    if finished or current == "drain" or mode == current:
        return None
    return FlowDecision(mode=mode, reason=command.reason)


class Liveness(StrEnum):
    """How the coordinator sees a worker."""

    ALIVE = "alive"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


class Membership(LastBeats[Heartbeat]):
    """The last heartbeat of each worker, by id; see ``schemas/liveness.py``."""

    def hear(self, heartbeat: Heartbeat, now: float) -> Liveness | None:
        """Note a heartbeat; the worker's new liveness if it changed, else None."""
        before = self.liveness(heartbeat.worker_id, now)
        if not self.observe(heartbeat.worker_id, heartbeat, now):
            return None
        after = self.liveness(heartbeat.worker_id, now)
        return after if after != before else None

    def holders(self) -> dict[str, str]:
        """The incarnation that holds each worker id, without workers that have left."""
        return {worker: beat.incarnation for worker, beat in self if beat.state is not WorkerState.STOPPED}

    def liveness(self, worker_id: str, now: float) -> Liveness | None:
        """The liveness of a worker at a time; None if it never sent a heartbeat."""
        beat = self.get(worker_id)
        if beat is None:
            return None
        # Checked before the time-out: a worker that announced its leave stays silent and is not lost.
        if beat.state is WorkerState.STOPPED:
            return Liveness.LEFT
        if self.is_silent(worker_id, now):
            return Liveness.LOST
        return Liveness.DRAINING if beat.state is WorkerState.DRAINING else Liveness.ALIVE

    def with_liveness(self, liveness: Liveness, now: float) -> list[str]:
        """Sorted ids of the workers with that liveness."""
        return sorted(worker for worker, _ in self if self.liveness(worker, now) is liveness)
