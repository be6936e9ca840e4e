"""The coordinator's driver: step reports, heartbeats and operator commands in, control messages out.

It handles a few messages per step, and its whole state can be rebuilt from its topics. It may be killed at any point:
its announcements are on the topic, and its successor announces the rest under the next numbers.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import structlog

from streamrl.bus.listening import HeartbeatReader
from streamrl.bus.port import Bus, Record, Subscription, TransactionalPublisher, message_of
from streamrl.coordinator.announcer import AnnouncedRelays, ControlAnnouncer
from streamrl.coordinator.policies import CoordinatorContext, Followed, OnePolicyControl, PolicyControl
from streamrl.coordinator.recovery import follow_steps, recover, subscribe_members
from streamrl.coordinator.scaling import SETTLE_STEPS, FleetBounds, FleetWatch
from streamrl.coordinator.state import ACTIONS, CoordinatorState, Liveness, Membership, VersionLedger, decide
from streamrl.schemas.control import OperatorCommand, WeightsReady
from streamrl.schemas.errors import FinishedRunContinues
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION, is_compatible_wire_version
from streamrl.schemas.reports import Heartbeat, RelayBeat, StepReport
from streamrl.schemas.settings import LoopSettings
from streamrl.weights.relay.chain import RelayMembership

log = structlog.get_logger()

POLL_S = 0.5
STOP_S = 3.0
"""Seconds for an announcement under way to end; if the broker is down, it would take longer."""
RELAYS_AGAIN_S = 5.0
"""Seconds between two announcements of the same weights, so that relays that start together are named together."""
LOOPS = ("steps", "members")
CLAIM_AGAIN_S = 2.0
"""Seconds of two heartbeats: a superseded worker that has read its successor's claim has left by then."""
FINISH_TIMEOUT_S = 60.0
"""Seconds after a coordinator's start in which a run that finished before it may still be continued. A trainer that
continues the run loads its model in this time."""


@dataclass(frozen=True)
class FleetScaling:
    """How the number of workers is decided.

    ``overlaps``: whether generation goes on while a step is trained. ``settle_steps``: see ``FleetWatch``.
    """

    bounds: FleetBounds
    overlaps: bool
    settle_steps: int = SETTLE_STEPS


@dataclass(frozen=True)
class LastEvaluation:
    """The last evaluation of a run, and for how long the run's end waits for it.

    ``newest_due``: gives the last step, up to a given one, whose weights are to be evaluated.
    """

    newest_due: Callable[[int], int]
    patience_s: float


@dataclass(frozen=True)
class CoordinatorTimeouts:
    """Time-outs in seconds.

    ``heartbeat_s``: silence after which a worker or relay is lost. ``finish_s``: see ``FINISH_TIMEOUT_S``.
    """

    heartbeat_s: float = LoopSettings().heartbeat_timeout_s
    finish_s: float = FINISH_TIMEOUT_S


@dataclass
class Coordinator:
    """The coordinator of a run; a second one supersedes the first.

    ``relays``: addresses to announce after those of relays that send heartbeats. ``on_tick`` is called with a loop's
    name at each of its turns. ``scaling``: None if the number of workers is fixed.
    ``evaluation``: None if the run has none. ``clock`` is monotonic: with it and the arrival of heartbeats the
    coordinator decides which workers are alive. ``time_of_day`` is only written into messages. ``policies`` answers
    questions that depend on how many policies share the stream; by default there is one.
    """

    bus: Bus
    run_name: str
    relays: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic
    timeouts: CoordinatorTimeouts = CoordinatorTimeouts()
    policies: Callable[[CoordinatorContext], PolicyControl] = OnePolicyControl
    on_tick: Callable[[str], None] = lambda name: None
    scaling: FleetScaling | None = None
    evaluation: LastEvaluation | None = None
    time_of_day: Callable[[], float] = time.time

    async def run(self, stop: asyncio.Event) -> None:
        """Announce weights, flow and wanted workers until stopped.

        Consumes: steps (from the beginning), recent heartbeats, operator commands (those not carried out yet).
        Produces: control.
        Waits for: any of the three.
        On failure: raises; a restart replays the topics and continues. ``Superseded``: another coordinator took over.
            ``FinishedRunContinues``: it announced the end of the run, and the run goes on; its successor continues.
        On stop: closes its clients; its announcements stay on the compacted topic.
        """
        # A cancellation may come before all clients are open, or while one is being closed: the others are closed too.
        async with AsyncExitStack() as clients:
            publisher = await self.bus.transactional(f"{self.run_name}.coordinator")
            clients.push_async_callback(publisher.close)
            await self._serve(publisher, clients, stop)

    async def _serve(self, publisher: TransactionalPublisher, clients: AsyncExitStack, stop: asyncio.Event) -> None:
        """Read the topics after the older coordinator was fenced, so that it cannot write to them any more."""
        presence = Presence(Membership(self.timeouts.heartbeat_s), RelayMembership(self.timeouts.heartbeat_s))
        context = self._context(publisher, presence)
        policies, state = self.policies(context), context.state
        steps = await recover(self.bus, self.run_name, state, policies)
        clients.push_async_callback(steps.close)
        evaluated = self.evaluation is not None
        others = await subscribe_members(self.bus, self.run_name, state.last_command, evaluated=evaluated)
        clients.push_async_callback(others.close)
        session = CoordinatorSession.open(self, context, policies, presence, steps)
        clients.push_async_callback(lambda: session.steps.close())  # another subscription, after a promotion
        log.info("coordinator ready", announced=str(state.ledger.announced), mode=state.mode, finished=state.finished)
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(session.steps_loop(stop))]
            loops.append(tasks.create_task(session.members_loop(others, stop)))
            loops.append(tasks.create_task(policies.run(stop)))
            await stop.wait()  # if a loop fails, this is cancelled and the group raises the loop's error
            _, late = await asyncio.wait(loops, timeout=STOP_S)
            for task in late:
                task.cancel()

    def _context(self, publisher: TransactionalPublisher, presence: "Presence") -> CoordinatorContext:
        state = CoordinatorState(VersionLedger())
        announcer = ControlAnnouncer(
            publisher=publisher,
            run=self.run_name,
            state=state,
            relays=lambda: _announced(presence.relays, self.relays, self.clock()),
            time_of_day=self.time_of_day,
            on_tick=self.tick_all,
        )
        return CoordinatorContext(
            bus=self.bus,
            run=self.run_name,
            state=state,
            announcer=announcer,
            workers=lambda: presence.taking_orders(self.clock()),
            clock=self.clock,
        )

    def tick_all(self) -> None:
        """Report a turn of every loop: while one announces, the others may wait for it."""
        for name in LOOPS:
            self.on_tick(name)


@dataclass
class Presence:
    """The workers and relays that send heartbeats.

    ``claimed_again``: for each superseded worker that is still alive, when the claim on its id was last announced, in
    seconds of the coordinator's clock. ``lost``: workers that were logged as lost.
    """

    members: Membership
    relays: RelayMembership
    claimed_again: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def extend(self, seconds: float) -> None:
        """Extend all time-outs: for so many seconds no heartbeat could arrive."""
        self.members.extend(seconds)
        self.relays.extend(seconds)

    def taking_orders(self, now: float) -> list[str]:
        """Living workers, except those whose wire version is too different: their orders would wait for ever."""
        alive = self.members.with_liveness(Liveness.ALIVE, now)
        return [worker for worker, beat in self.members if worker in alive and is_compatible_wire_version(beat.wire)]


@dataclass
class RunEnd:
    """What the end of the run waits for.

    ``started_at``: when this session started, in seconds of the coordinator's clock. ``old_finish``: the version of a
    last step that was reported before the session. ``evaluated``: versions with an evaluation report. ``ended_at``:
    when the last step was seen. ``announced``: the step that was announced as the last.
    """

    started_at: float
    old_finish: PolicyVersion | None
    evaluated: set[PolicyVersion] = field(default_factory=set)
    ended_at: float | None = None
    announced: int | None = None


@dataclass
class CoordinatorSession:
    """The state and loops of one coordinator process, after it has read its topics.

    ``steps``: subscription to the followed policy's steps. ``named_at``: when relays were last announced, or this
    session started.
    """

    coordinator: Coordinator
    context: CoordinatorContext
    policies: PolicyControl
    presence: Presence
    steps: Subscription
    watch: FleetWatch | None
    end: RunEnd
    named_at: float

    @classmethod
    def open(
        cls,
        coordinator: Coordinator,
        context: CoordinatorContext,
        policies: PolicyControl,
        presence: Presence,
        steps: Subscription,
    ) -> "CoordinatorSession":
        """A session with the recovered state."""
        state, now = context.state, coordinator.clock()
        latest = state.ledger.latest
        return cls(
            coordinator=coordinator,
            context=context,
            policies=policies,
            presence=presence,
            steps=steps,
            watch=_watch(coordinator.scaling, state.wanted_workers),
            end=RunEnd(now, latest.version if latest is not None and latest.finished else None),
            named_at=now,
        )

    @property
    def state(self) -> CoordinatorState:
        """The state that the control topic gives."""
        return self.context.state

    async def steps_loop(self, stop: asyncio.Event) -> None:
        """Turn step reports into announcements.

        Consumes: steps of the followed policy. Produces: control (weights ready, wanted workers, run finished).
        Waits for: the policy's trainer.
        On failure: raises to ``run``. On stop: returns within one poll.
        """
        followed = self.policies.followed
        # An earlier coordinator may have been killed before it announced weights: the replayed reports have them.
        await self._announce_weights()
        while not stop.is_set():
            self.coordinator.on_tick(LOOPS[0])
            if self.policies.followed != followed:
                followed = await self._follow_other()
            records = await self.steps.poll(timeout_s=POLL_S)
            if self.policies.followed != followed:
                continue  # these records are another policy's
            messages = [message_of(record, warn=True) for record in records]
            reports = [message for message in messages if isinstance(message, StepReport)]
            for report in reports:
                self._note(report)
            # Only the newest report is announced; scaling needs the times of each.
            await self._announce_weights()
            await self._announce_relays()
            for report in reports:
                await self._scale(report)
            # Only at the end of the topic: a continued run's report may follow right after the one that ended it.
            if not records:
                await self._announce_end()

    def _note(self, report: StepReport) -> None:
        announced, ledger = self.policies.as_announced(report), self.state.ledger
        if announced is not None:
            ledger.observe_report(announced)
        if announced is None or not ledger.is_newest(announced):
            log.warning("report of an older lineage ignored", version=str(report.version))

    async def _follow_other(self) -> Followed:
        """Read the steps of the newly followed policy from the beginning, and announce its weights."""
        context, former = self.context, self.steps
        async with context.announcing:
            followed = self.policies.followed
            self.steps = await follow_steps(context.bus, context.run, self.state, self.policies)
        await former.close()
        await self._announce_weights()
        return followed

    async def _announce_weights(self) -> None:
        async with self.context.announcing:
            report = self.state.ledger.to_announce()
            if report is not None:
                await self._announce(report)
                policy = self.policies.followed.policy
                log.info("weights announced", version=str(report.version), step=report.step, policy=policy)
        if report is not None and not report.finished and self.end.announced is not None:
            # After a restore, or damage to the last checkpoint. Processes that read the end first leave nevertheless.
            raise FinishedRunContinues(
                f"expected nothing after step {self.end.announced}, announced as the last, got weights "
                f"{report.version} of step {report.step}: the run goes on. `streamrl run` restarts its own processes "
                "that have left; restart those on other machines that nothing keeps alive"
            )

    async def _announce(self, report: StepReport) -> None:
        fields = self.policies.about_weights(report)
        self.policies.observe(await self.context.announcer.weights(WeightsReady, report, **fields))
        self.named_at = self.coordinator.clock()

    async def _announce_relays(self) -> None:
        """Announce the same weights again if the living relays are no longer those named: else no worker finds them.

        Only this loop announces weights, so that older ones never follow newer ones.
        """
        latest, named = self.state.ledger.latest, self.state.relays
        if named is None or latest is None or latest.version != self.state.ledger.announced or latest.finished:
            return
        # After the end of the run, announced weights would mean that it goes on.
        if self.state.finished or self.coordinator.clock() - self.named_at < RELAYS_AGAIN_S:
            return
        if (found := frozenset(self.context.announcer.relays().addresses)) != named:
            log.info("relays changed", there=sorted(found - named), gone=sorted(named - found))
            async with self.context.announcing:
                if self.state.ledger.latest is latest:
                    await self._announce(latest)

    async def _scale(self, report: StepReport) -> None:
        if self.watch is not None and (decision := self.watch.stepped(report)) is not None:
            log.info("workers wanted", count=decision.workers, reason=decision.reason)
            await self.context.announcer.fleet_target(decision.workers, decision.reason)

    async def _announce_end(self) -> None:
        """Announce the end of the run, if it is final.

        Called when the steps topic has nothing more: a resumed trainer repeats its last report before newer ones.
        """
        latest = self.state.ledger.latest
        if latest is None or not latest.finished or self.state.finished or self._may_go_on(latest.version):
            return
        if self._is_evaluated_still(latest):
            return
        async with self.context.announcing:
            if self.state.ledger.latest is not latest:
                return
            await self.context.announcer.run_finished(latest.step, "the trainer reached its last step")
            self.end.announced = latest.step
        log.info("run finished", step=latest.step)

    def _may_go_on(self, last: PolicyVersion) -> bool:
        """Whether the end is older than this session, and the trainer of a continued run may still be starting."""
        open_for_s = self.coordinator.clock() - self.end.started_at
        return last == self.end.old_finish and open_for_s < self.coordinator.timeouts.finish_s

    def _is_evaluated_still(self, last: StepReport) -> bool:
        """Whether workers must stay for the evaluation of the last weights that are due."""
        evaluation, now = self.coordinator.evaluation, self.coordinator.clock()
        if evaluation is None:
            return False
        end = self.end
        end.ended_at = now if end.ended_at is None else end.ended_at
        # By the step's number alone: a lineage that resumes from evaluated weights does not evaluate them again.
        due = evaluation.newest_due(last.step) + last.version.number - last.step
        is_reported = any(version.number == due for version in end.evaluated)
        return not is_reported and now - end.ended_at < evaluation.patience_s

    async def members_loop(self, others: Subscription, stop: asyncio.Event) -> None:
        """Track which workers and relays are alive, and carry out operators' commands.

        Consumes: heartbeats, commands, evaluation reports.
        Produces: control (worker claims, flow, drain of one worker, and the effects of commands about policies).
        Waits for: any of them.
        On failure: raises to ``run``. On stop: returns within one poll.
        """
        ends, caught_up = await others.end_offsets(), False  # no claims before all present heartbeats are read
        presence = self.presence
        listening = HeartbeatReader(others, presence.members.timeout_s, presence.extend, self.coordinator.clock)
        while not stop.is_set():
            self.coordinator.on_tick(LOOPS[1])
            for record in await listening.poll(POLL_S):
                # Old heartbeats count as of now, since their time stamps are from other clocks. Workers that are gone
                # are noticed one time-out later.
                await self._handle(record, self.coordinator.clock())
            # With only some of the heartbeats, an id could go to an incarnation that has a successor already.
            caught_up = caught_up or all(at >= ends[tp] for tp, at in (await others.positions()).items())
            if caught_up:
                await self._claim_due()
                self._note_lost()
                await self.policies.deal_workers()

    async def _handle(self, record: Record, at: float) -> None:
        match message_of(record, warn=True):
            case Heartbeat() as heartbeat:
                self._observe(heartbeat, at)
            case RelayBeat() as beat:
                self.presence.relays.observe(beat.relay_id, beat, at)
            case EvaluationReport() as report:
                self.end.evaluated.add(report.version)
            case OperatorCommand() as command:
                await self._carry_out(command, record.offset)

    def _observe(self, heartbeat: Heartbeat, at: float) -> None:
        worker = heartbeat.worker_id
        if self.presence.members.was_replaced(worker, heartbeat.incarnation):
            self._claim_again(heartbeat, at)
        elif self.watch is not None:
            self.watch.heard(heartbeat)
        if (liveness := self.presence.members.hear(heartbeat, at)) is not None:
            log.info("worker changed", worker=worker, liveness=liveness.value)
            self.presence.lost.discard(worker)
            if liveness is Liveness.ALIVE and not is_compatible_wire_version(heartbeat.wire):
                log.warning("worker gets no orders", worker=worker, wire=heartbeat.wire, expected=WIRE_VERSION)

    def _claim_again(self, heartbeat: Heartbeat, at: float) -> None:
        """If a superseded incarnation has not left after a while, announce the claim again: it may have missed it."""
        worker = heartbeat.worker_id
        if at - self.presence.claimed_again.setdefault(worker, at) > CLAIM_AGAIN_S:
            log.warning("superseded worker still there", worker=worker, incarnation=heartbeat.incarnation)
            # Forgetting the claim makes it due again: the next turn of the loop announces it.
            self.presence.claimed_again[worker] = at
            self.state.forget_claim(worker)

    async def _claim_due(self) -> None:
        """Announce the claims that are not on the topic yet or are due again."""
        due = {
            worker: holder
            for worker, holder in self.presence.members.holders().items()
            if self.state.claims.get(worker) != holder
        }
        if due:
            await self.context.announcer.workers_claimed(due)

    def _note_lost(self) -> None:
        presence = self.presence
        lost = presence.members.with_liveness(Liveness.LOST, self.coordinator.clock())
        for worker in sorted(set(lost) - presence.lost):
            log.warning("worker lost", worker=worker, silent_for_s=presence.members.timeout_s)
            presence.lost.add(worker)
            if self.watch is not None:
                self.watch.lost(worker)

    async def _carry_out(self, command: OperatorCommand, offset: int) -> None:
        state = self.state
        if command.action not in ACTIONS:
            await self.policies.carry_out(command, offset)
            return
        decision = decide(command, state.mode, state.finished)
        if decision is None:
            log.warning("command changes nothing", action=command.action, mode=state.mode, finished=state.finished)
        elif decision.drain_worker is not None:
            # The message carries the command's offset: a successor continues after the last one that was carried out.
            await self.context.announcer.drain_worker(decision.drain_worker, decision.reason, offset)
        elif decision.mode is not None:
            await self.context.announcer.flow(decision.mode, decision.reason, offset)


def _announced(relays: RelayMembership, seeds: tuple[str, ...], now: float) -> AnnouncedRelays:
    """The relays that send heartbeats, then those of the settings, which may be of a kind that sends none."""
    living = relays.living(now)
    addresses = tuple(member.address for member in living)
    return AnnouncedRelays(
        addresses + tuple(seed for seed in seeds if seed not in addresses),
        tuple(member.host for member in living),
    )


def _watch(scaling: FleetScaling | None, wanted: int | None) -> FleetWatch | None:
    if scaling is None:
        return None
    fewest = scaling.bounds.fewest
    return FleetWatch(
        scaling.bounds, scaling.overlaps, fewest if wanted is None else wanted, settle_steps=scaling.settle_steps
    )
