"""The coordinator's driver: step reports, heartbeats and operator commands in, control messages out.

It handles a few messages per step, holds nothing that its topics do not hold, and may be killed at any point: what it
had announced is on the topic, whole, and its successor announces the rest under the next numbers.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import structlog

from streamrl.bus.listening import Listening
from streamrl.bus.port import Bus, Record, Subscription, TransactionalPublisher, message_of
from streamrl.coordinator.announcer import AnnouncedRelays, ControlAnnouncer
from streamrl.coordinator.policies import CoordinatorContext, Followed, OnePolicyControl, PolicyControl
from streamrl.coordinator.recovery import follow_steps, recover, subscribe_members
from streamrl.coordinator.scaling import FleetBounds, FleetWatch
from streamrl.coordinator.settings import CoordinatorSettings, ScalingSettings
from streamrl.coordinator.state import ACTIONS, CoordinatorState, Liveness, Membership, VersionLedger, decide
from streamrl.schemas.control import OperatorCommand, WeightsReady
from streamrl.schemas.errors import EndUndone
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION, is_near_version
from streamrl.schemas.reports import Heartbeat, RelayBeat, StepReport
from streamrl.schemas.settings import LoopSettings
from streamrl.weights.relay.chain import RelayMembership

log = structlog.get_logger()

POLL_S = 0.5
STOP_S = 3.0
"""For an announcement that is under way; a broker that is away would hold it for longer."""
RELAYS_AGAIN_S = 5.0
"""Between two announcements of the same weights: relays that start together are named together."""
LOOPS = ("steps", "members")
CLAIM_AGAIN_S = 2.0
"""Two heartbeats: a superseded worker that read its successor's claim has left by then."""


@dataclass(frozen=True)
class FleetScaling:
    """``overlaps``: whether generation goes on while a step is trained."""

    bounds: FleetBounds
    settings: ScalingSettings
    overlaps: bool


@dataclass(frozen=True)
class LastEvaluation:
    """Which weights are the last to be evaluated during a run, and for how long its end waits for that.

    ``newest_due``: of the steps up to this one, the last whose weights are evaluated.
    """

    newest_due: Callable[[int], int]
    patience_s: float


@dataclass
class Coordinator:
    """One per run; a second one supersedes the first. ``on_tick`` is told, by name, of every turn of a loop.

    ``scaling``: None where the number of workers stays as it is; ``evaluation``: None where the run has none. Who is
    there is judged by ``clock``, which is monotonic, and by when heartbeats arrive; ``time_of_day`` is only written
    into messages. ``policies`` answers what depends on how many policies share the stream; by default there is one.
    """

    bus: Bus
    run_name: str
    settings: CoordinatorSettings
    clock: Callable[[], float] = time.monotonic
    heartbeat_timeout_s: float = LoopSettings().heartbeat_timeout_s
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
        On failure: raises; a restart replays the topics and goes on. ``Superseded``: another coordinator took over.
            ``EndUndone``: what it had told to be the end is none; its successor goes on.
        On stop: closes its clients; what it announced stays on the compacted topic.
        """
        # A cancellation may come before all clients are open, or while one is closed: the others are closed too.
        async with AsyncExitStack() as clients:
            publisher = await self.bus.transactional(f"{self.run_name}.coordinator")
            clients.push_async_callback(publisher.close)
            await self._serve(publisher, clients, stop)

    async def _serve(self, publisher: TransactionalPublisher, clients: AsyncExitStack, stop: asyncio.Event) -> None:
        """The topics are read after the older coordinator was fenced, so that nothing of it comes later."""
        presence = Presence(Membership(self.heartbeat_timeout_s), RelayMembership(self.heartbeat_timeout_s))
        context = self._context(publisher, presence)
        policies, state = self.policies(context), context.state
        steps = await recover(self.bus, self.run_name, state, policies)
        clients.push_async_callback(steps.close)
        evaluated = self.evaluation is not None
        others = await subscribe_members(self.bus, self.run_name, state.last_command, evaluated=evaluated)
        clients.push_async_callback(others.close)
        session = CoordinatorSession.open(self, context, policies, presence, steps)
        clients.push_async_callback(lambda: session.steps.close())  # another policy's, once that one is followed
        log.info("coordinator ready", announced=str(state.ledger.announced), mode=state.mode, finished=state.finished)
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(session.steps_loop(stop))]
            loops.append(tasks.create_task(session.members_loop(others, stop)))
            loops.append(tasks.create_task(policies.run(stop)))
            await stop.wait()  # a loop that fails cancels this, and its error leaves the group
            _, late = await asyncio.wait(loops, timeout=STOP_S)
            for task in late:
                task.cancel()

    def _context(self, publisher: TransactionalPublisher, presence: "Presence") -> CoordinatorContext:
        state = CoordinatorState(VersionLedger())
        announcer = ControlAnnouncer(
            publisher=publisher,
            run=self.run_name,
            state=state,
            relays=lambda: _announced(presence.relays, self.settings.relays, self.clock()),
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
        """Both loops wait for a broker's answer: either may hold the announcer."""
        for name in LOOPS:
            self.on_tick(name)


@dataclass
class Presence:
    """Which workers and relays are heard.

    ``claimed_again``: when each superseded worker that is still there was last told so, in seconds of the coordinator's
    clock. ``lost``: workers of which it was said that they are lost.
    """

    members: Membership
    relays: RelayMembership
    claimed_again: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def extend(self, seconds: float) -> None:
        """No worker or relay could be heard for so long."""
        self.members.extend(seconds)
        self.relays.extend(seconds)

    def taking_orders(self, now: float) -> list[str]:
        """Workers that are alive; not those of a version too far off, whose orders would wait for ever."""
        alive = self.members.with_liveness(Liveness.ALIVE, now)
        return [worker for worker, beat in self.members if worker in alive and is_near_version(beat.wire)]


@dataclass
class RunEnd:
    """What the end of the run waits for.

    ``began``: when this session began, in seconds of the coordinator's clock; ``old_finish``: the version of a last
    step that was reported before. ``evaluated``: versions with a report; ``ended_at``: when the last step was seen;
    ``told``: the step of which everybody was told that it is the last.
    """

    began: float
    old_finish: PolicyVersion | None
    evaluated: set[PolicyVersion] = field(default_factory=set)
    ended_at: float | None = None
    told: int | None = None


@dataclass
class CoordinatorSession:
    """What one process of the coordinator holds, from the moment it has read its topics.

    ``steps``: of the policy that is followed; ``named_at``: when relays were named last, or this session began.
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
        """Begin, with what was recovered."""
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
        """What the control topic says."""
        return self.context.state

    async def steps_loop(self, stop: asyncio.Event) -> None:
        """Turn step reports into announcements.

        Consumes: steps of the policy that is followed. Produces: control (weights ready, wanted workers, run finished).
        Waits for: its trainer.
        On failure: raises to ``run``. On stop: returns within one poll.
        """
        followed = self.policies.followed
        # What an earlier coordinator was killed before announcing is in the topics that were replayed.
        await self._announce_weights()
        while not stop.is_set():
            self.coordinator.on_tick(LOOPS[0])
            if self.policies.followed != followed:
                followed = await self._follow_other()
            records = await self.steps.poll(timeout_s=POLL_S)
            if self.policies.followed != followed:
                continue  # what was read is of another policy
            messages = [message_of(record, warn=True) for record in records]
            reports = [message for message in messages if isinstance(message, StepReport)]
            for report in reports:
                self._note(report)
            # Of all the reports that were read only the newest is announced; the fleet's times are of each.
            await self._announce_weights()
            await self._announce_relays()
            for report in reports:
                await self._scale(report)
            # Only behind the last record: the report of a continued run may stand right after the one that ended it.
            if not records:
                await self._announce_end()

    def _note(self, report: StepReport) -> None:
        announced, ledger = self.policies.as_announced(report), self.state.ledger
        if announced is not None:
            ledger.observe_report(announced)
        if announced is None or not ledger.is_newest(announced):
            log.warning("report of an older lineage ignored", version=str(report.version))

    async def _follow_other(self) -> Followed:
        """Read the steps of the policy that is followed now, from the beginning; announce what it has exported."""
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
        if report is not None and not report.finished and self.end.told is not None:
            # A restore's doing, or of damage to the last checkpoint. Whoever reads the end first leaves all the same.
            raise EndUndone(
                f"expected nothing behind step {self.end.told}, the last, got weights {report.version} of step "
                f"{report.step}: the end was undone while everybody was told of it, and the run goes on. `streamrl "
                "run` starts again what has left; start again what runs elsewhere and is kept alive by nothing else"
            )

    async def _announce(self, report: StepReport) -> None:
        about = self.policies.about_weights(report)
        self.policies.observe(await self.context.announcer.weights(WeightsReady, report, **about))
        self.named_at = self.coordinator.clock()

    async def _announce_relays(self) -> None:
        """The same weights again, once other relays are there than those named: else nobody would find these.

        Only in this loop, which announces all weights, so that older ones never come behind newer ones.
        """
        latest, named = self.state.ledger.latest, self.state.relays
        if named is None or latest is None or latest.version != self.state.ledger.announced or latest.finished:
            return
        # Behind the end of the run, announced weights would mean that it goes on.
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
        """Once nothing follows: a resumed trainer repeats its last report before the one that says that it goes on."""
        latest = self.state.ledger.latest
        if latest is None or not latest.finished or self.state.finished or self._may_go_on(latest.version):
            return
        if self._is_evaluated_still(latest):
            return
        async with self.context.announcing:
            if self.state.ledger.latest is not latest:
                return
            await self.context.announcer.run_finished(latest.step, "the trainer reached its last step")
            self.end.told = latest.step
        log.info("run finished", step=latest.step)

    def _may_go_on(self, last: PolicyVersion) -> bool:
        """Whether the end was there before this session, and the trainer of a continued run may still be starting."""
        open_for_s = self.coordinator.clock() - self.end.began
        return last == self.end.old_finish and open_for_s < self.coordinator.settings.finish_timeout_s

    def _is_evaluated_still(self, last: StepReport) -> bool:
        """Whether workers are to stay for the evaluation of the last weights that are due."""
        evaluation, now = self.coordinator.evaluation, self.coordinator.clock()
        if evaluation is None:
            return False
        end = self.end
        end.ended_at = now if end.ended_at is None else end.ended_at
        # By the step alone: a lineage that goes on from evaluated weights does not have them evaluated again.
        due = evaluation.newest_due(last.step) + last.version.number - last.step
        is_reported = any(version.number == due for version in end.evaluated)
        return not is_reported and now - end.ended_at < evaluation.patience_s

    async def members_loop(self, others: Subscription, stop: asyncio.Event) -> None:
        """Follow who is there, and carry out what operators ask for.

        Consumes: heartbeats, commands, evaluation reports.
        Produces: control (worker claims, flow, drain of one worker, and what commands about policies come to).
        Waits for: either.
        On failure: raises to ``run``. On stop: returns within one poll.
        """
        ends, caught_up = await others.end_offsets(), False  # a claim is judged by all heartbeats that were there
        presence = self.presence
        listening = Listening(others, presence.members.timeout_s, presence.extend, self.coordinator.clock)
        while not stop.is_set():
            self.coordinator.on_tick(LOOPS[1])
            for record in await listening.poll(POLL_S):
                # Old heartbeats too count from now on: their time stamps are of other clocks, and one time-out from now
                # whoever is gone is missed.
                await self._handle(record, self.coordinator.clock())
            # Judged by a part of the heartbeats, the id could go to an incarnation that was followed by another.
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
        if self.presence.members.is_former(worker, heartbeat.incarnation):
            self._claim_again(heartbeat, at)
        elif self.watch is not None:
            self.watch.heard(heartbeat)
        if (liveness := self.presence.members.hear(heartbeat, at)) is not None:
            log.info("worker changed", worker=worker, liveness=liveness.value)
            self.presence.lost.discard(worker)
            if liveness is Liveness.ALIVE and not is_near_version(heartbeat.wire):
                log.warning("worker gets no orders", worker=worker, wire=heartbeat.wire, expected=WIRE_VERSION)

    def _claim_again(self, heartbeat: Heartbeat, at: float) -> None:
        """A superseded incarnation that has not left after a while is told again: it may never have read it."""
        worker = heartbeat.worker_id
        if at - self.presence.claimed_again.setdefault(worker, at) > CLAIM_AGAIN_S:
            log.warning("superseded worker still there", worker=worker, incarnation=heartbeat.incarnation)
            # Forgetting the claim makes it due: the next turn of the loop writes it again.
            self.presence.claimed_again[worker] = at
            self.state.forget_claim(worker)

    async def _claim_due(self) -> None:
        """Claims that are not on the topic yet, or are due again."""
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
            # The offset travels with the message: a successor goes on behind the last command that one names.
            await self.context.announcer.drain_worker(decision.drain_worker, decision.reason, offset)
        elif decision.mode is not None:
            await self.context.announcer.flow(decision.mode, decision.reason, offset)


def _announced(relays: RelayMembership, seeds: tuple[str, ...], now: float) -> AnnouncedRelays:
    """The relays that are heard, and behind them those of the settings: they may be of a kind that says nothing."""
    living = relays.living(now)
    heard = tuple(member.address for member in living)
    return AnnouncedRelays(
        heard + tuple(seed for seed in seeds if seed not in heard),
        tuple(member.host for member in living),
    )


def _watch(scaling: FleetScaling | None, wanted: int | None) -> FleetWatch | None:
    if scaling is None:
        return None
    fewest = scaling.bounds.fewest
    return FleetWatch(scaling.bounds, scaling.settings, scaling.overlaps, fewest if wanted is None else wanted)
