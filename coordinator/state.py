"""What the coordinator knows, and how it is rebuilt by replaying its topics from their beginning to their present end.

The end of a run holds until newer weights are announced behind it: then the run was continued. Both messages survive
compaction, and their order on the topic is the order of the announcements.

Invariants of the version ledger:
- announced_versions_only_grow: an announcement is newer, by (lineage, number), than every earlier one;
- orphans_never_win: weights of an older lineage are never announced after a newer lineage's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import structlog

from streamrl.bus.port import Bus, Subscription, message_of
from streamrl.schemas.control import (
    AnnouncedWeights,
    ArmWeights,
    Control,
    DrainWorker,
    FleetTarget,
    FlowControl,
    InstanceState,
    OperatorCommand,
    PolicySplit,
    Promotion,
    RunFinished,
    Served,
    WeightsReady,
    WorkerClaimed,
)
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion, scope_of
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import COMMANDS, CONTROL, EVALUATIONS, HEARTBEATS, STEPS

log = structlog.get_logger()

FlowMode = Literal["run", "pause", "drain"]

_MODE_AFTER: dict[str, FlowMode] = {"pause": "pause", "resume": "run", "drain": "drain"}
RECENT_HEARTBEATS = 5_000
"""Read again after a restart, to know which incarnation of a worker came first: ten minutes of eight workers."""


@dataclass
class CoordinatorState:
    """The state behind the control topic; the subscription goes on from where the replay ended.

    ``relays``: what the last announcement of weights named; None before the first. ``instances``: the trainers beside
    the served one, by name. ``served``: which one it is, if another was promoted; ``promotion``: what was announced of
    its weights, None before the first. ``split``: the last one ordered; ``arm_weights``: announced last of each arm.
    ``last_command``: offset of the last operator command that a message on the topic carried out, -1 before the first.
    """

    ledger: "VersionLedger"
    mode: FlowMode = "run"
    finished: bool = False
    next_sequence: int = 0
    wanted_workers: int | None = None
    claims: dict[str, str] = field(default_factory=dict)
    last_command: int = -1
    relays: frozenset[str] | None = None
    instances: dict[str, InstanceState] = field(default_factory=dict)
    served: Served | None = None
    promotion: Promotion | None = None
    split: PolicySplit | None = None
    arm_weights: dict[str, ArmWeights] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """Whose weights are announced."""
        return SERVED_POLICY if self.served is None else self.served.policy

    def apply(self, message: Message) -> None:
        """Take one message of the control or steps topic into account."""
        match message:
            case WeightsReady():
                self.announced(message)
            case FlowControl():
                self.mode = message.mode
                self.last_command = max(self.last_command, message.command_offset)
            case DrainWorker():
                self.last_command = max(self.last_command, message.command_offset)
            case InstanceState():
                self.instances[message.policy] = message
                self.last_command = max(self.last_command, message.command_offset)
            case Served():
                self.serve(message)
                self.last_command = max(self.last_command, message.command_offset)
            case PolicySplit():
                self.split = message
                self.last_command = max(self.last_command, message.command_offset)
            case ArmWeights():
                self.arm_weights[message.policy] = message
            case FleetTarget():
                self.wanted_workers = message.workers
            case RunFinished():
                self.finished = True
            case WorkerClaimed():
                self.claims[message.worker_id] = message.incarnation
            case StepReport():
                self.ledger.observe_report(message)
        # Compaction removes messages, never the order: the largest number that is left is the last one given.
        if isinstance(message, Control):
            self.next_sequence = max(self.next_sequence, message.sequence + 1)

    def serve(self, message: Served) -> None:
        """Another policy's weights are announced from now on, and nobody else's."""
        self.served, self.ledger.since, self.ledger.latest = message, message.since, None
        self.promotion = self.promotion_at(self.promotion)

    def promotion_at(self, found: Promotion | None) -> Promotion | None:
        """A promotion, if it is the one that holds."""
        served = self.served
        is_current = served is not None and found is not None and found.since == served.since
        return found if is_current else None

    def promotion_of(self, report: StepReport) -> Promotion | None:
        """What is to be announced with the weights of a report, which bears their served version."""
        if (served := self.served) is None:
            return None
        version, first = report.version, self.promotion
        return Promotion(
            policy=served.policy,
            since=served.since,
            lineage=version.lineage if first is None else first.lineage,
            shift=version.number - report.step,
        )

    def announced(self, message: WeightsReady) -> None:
        """Weights were announced; newer ones mean that a finished run goes on."""
        self.relays = frozenset(message.relays)
        self.promotion = message.promotion
        if self.ledger.observe_announcement(message):
            self.finished = False


async def recover(bus: Bus, run: str, client_id: str) -> tuple[CoordinatorState, Subscription]:
    """Replay control, then steps; the steps subscription is returned, placed behind what was replayed.

    Raises:
        BusUnavailable: the broker does not answer, or the topics do not exist.
    """
    state = CoordinatorState(VersionLedger())
    # Control first: reports that are read after it are compared with what was announced.
    control = await bus.subscribe([CONTROL.full_name(run)], client_id=client_id, start="earliest")
    try:
        await _replay(control, state)
    finally:
        await control.close()
    return state, await follow_steps(bus, run, client_id, state)


async def follow_steps(bus: Bus, run: str, client_id: str, state: CoordinatorState) -> Subscription:
    """A subscription to the steps of the policy that is served, placed behind those that were applied to the state."""
    topic = STEPS.full_name(scope_of(run, state.policy))
    steps = await bus.subscribe([topic], client_id=client_id, start="earliest")
    try:
        await _replay(steps, state)
    except BaseException:  # a cancellation too: nobody else has it yet
        await steps.close()
        raise
    return steps


async def subscribe_members(
    bus: Bus, run: str, client_id: str, last_command: int, *, evaluated: bool = False
) -> Subscription:
    """Recent heartbeats, the operators' commands behind the last one carried out, and all that follows.

    And what was evaluated, of a run that has an evaluation.

    Commands that changed nothing are judged again, in the same order, and change nothing again.
    """
    topics = [HEARTBEATS.full_name(run), COMMANDS.full_name(run)]
    topics += [EVALUATIONS.full_name(run)] if evaluated else []
    # A subscription at the end is the only way to ask where the end is.
    now = await bus.subscribe(topics, client_id=client_id, start="latest")
    try:
        ends, first = await now.positions(), await now.beginning_offsets()
    finally:
        await now.close()
    # Within what the broker holds: retention may have passed a place by, and a topic made anew may not reach it yet.
    heartbeats, commands = topics[:2]
    # What was evaluated is a record a version: all of it.
    wanted = {
        tp: {heartbeats: end - RECENT_HEARTBEATS, commands: min(last_command + 1, end)}.get(tp.topic, 0)
        for tp, end in ends.items()
    }
    start = {tp: max(first[tp], offset) for tp, offset in wanted.items()}
    return await bus.subscribe(topics, client_id=client_id, start=start)


async def _replay(subscription: Subscription, state: CoordinatorState) -> None:
    """Read until every partition has reached the end it had at the start; bounded by that end."""
    ends = await subscription.end_offsets()
    # By positions and not by records: the last offsets may be transaction markers, or compacted away.
    while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
        for record in await subscription.poll(timeout_s=1.0):
            if (message := message_of(record, warn=True)) is not None:
                state.apply(message)


@dataclass
class VersionLedger:
    """Reported and announced versions of the policy that is served.

    ``since``: of one that was promoted, what was announced before; only reports that bear a later served version count.
    ``latest`` has the version that is announced.
    """

    announced: PolicyVersion | None = None
    latest: StepReport | None = None
    since: PolicyVersion | None = None

    def observe_report(self, report: StepReport) -> bool:
        """Note a step; true if it exported weights that are newer than every other's."""
        # Without a checksum no weights were exported at this step, so there is nothing to announce.
        version = self._announced_as(report)
        if report.manifest_sha256 is None or version is None:
            return False
        if self.latest is not None and version <= self.latest.version:
            return False
        self.latest = report.replace(version=version)
        return True

    def _announced_as(self, report: StepReport) -> PolicyVersion | None:
        """The version under which workers know a report's weights; None: it is of a time when others were served."""
        if self.since is None:
            return report.version
        return report.served_as if report.served_as is not None and report.served_as > self.since else None

    def is_newest(self, report: StepReport) -> bool:
        """Whether no newer weights than this report's are known."""
        version = self._announced_as(report)
        return version is not None and (self.latest is None or version >= self.latest.version)

    def observe_announcement(self, message: AnnouncedWeights) -> bool:
        """Note an announcement, our own or one found on the control topic; true if it is newer than all others."""
        # Versions are tuples, (lineage, number): 2-101 is above 1-105, whose steps a crash undid.
        if self.announced is not None and message.version <= self.announced:
            return False
        self.announced = message.version
        return True

    def to_announce(self) -> StepReport | None:
        """The report whose weights should be announced now, or none."""
        if self.latest is None or (self.announced is not None and self.latest.version <= self.announced):
            return None
        return self.latest


def decide_promotion(
    command: OperatorCommand, known: Mapping[str, InstanceState], served: str, announced: PolicyVersion | None
) -> str | None:
    """The policy that is to be served now, or none: it is already, is not attached or is paused, or nothing is served
    yet that it could take the place of.
    """
    policy, instance = command.policy or "", known.get(command.policy or "")
    is_there = policy == SERVED_POLICY or (instance is not None and instance.mode == "run")
    return policy if is_there and policy != served and announced is not None else None


InstanceMode = Literal["run", "pause", "detached"]
_INSTANCE_AFTER: dict[str, InstanceMode] = {
    "attach": "run",
    "detach": "detached",
    "pause_instance": "pause",
    "resume_instance": "run",
}


INSTANCE_ACTIONS = frozenset(_INSTANCE_AFTER)


def decide_instance(
    command: OperatorCommand, known: Mapping[str, InstanceState], served: str = SERVED_POLICY
) -> InstanceMode | None:
    """What the instance that a command is about shall do, or none: it is as it should be, or unknown.

    The one that is served is neither paused nor detached: workers would wait for its weights.

    An instance that is attached again while it is paused stays paused: what a person asked for outlives a restart.
    """
    mode, now = _INSTANCE_AFTER[command.action], known.get(command.policy or "")
    if not command.policy:
        return None
    if command.action == "attach":
        return mode if now is None or now.mode == "detached" else None
    if now is None or now.mode in (mode, "detached") or (command.policy == served and mode != "run"):
        return None
    return mode


@dataclass(frozen=True)
class FlowDecision:
    """Set the flow of everyone (``mode``), or let one worker leave (``drain_worker``)."""

    mode: FlowMode | None = None
    drain_worker: str | None = None
    reason: str = ""


def decide(command: OperatorCommand, current: FlowMode, finished: bool) -> FlowDecision | None:
    """The decision that a command leads to, or none: a finished or draining run cannot be paused or resumed."""
    if command.action == "drain_worker":
        return FlowDecision(drain_worker=command.worker_id, reason=command.reason) if command.worker_id else None
    mode = _MODE_AFTER[command.action]
    # Draining has no way back: workers have left by now.
    if finished or current == "drain" or mode == current:
        return None
    return FlowDecision(mode=mode, reason=command.reason)
