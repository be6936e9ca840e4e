"""The evaluator's driver: reads the topics, orders samples of held-out prompts, and reports the results of weights.

Invariants:
- evaluation_trains_nothing: evaluation's orders and samples have topics of their own, which neither dispatcher nor
  trainer reads. So admission, staleness, the ledger and the audit ignore them;
- training_is_not_held_up: evaluation takes at most a share of a worker's slots (``SLOTS_SHARE``), and the worker
  gets few more orders than it can sample at a time;
- one_evaluator_reports: reports are committed under one transactional id, whose newest holder fences the others;
- a_promotion_is_not_missed: the evaluator processes messages that arrive while it reads the past after that. If another
  policy's weights follow, weights of this policy that were never announced do not count.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import structlog

from streamrl.bus.clocks import Clocks
from streamrl.bus.listening import HeartbeatReader
from streamrl.bus.port import Bus, Outgoing, Subscription, TransactionalPublisher, message_of
from streamrl.bus.waiting import in_thread
from streamrl.producers.dispatch.fleet import MAX_ATTEMPTS, LiveWorkers
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.recovery import Positions, history
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.evaluation.results import FailedRewards, PassRule, ScoredSample, append_evaluations, scored
from streamrl.producers.evaluation.settings import PATIENCE_S, HeldOutSettings
from streamrl.producers.evaluation.state import EvaluationState, HeldOutPrompts
from streamrl.schemas.control import Control, FlowControl, RunFinished
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import Heartbeat, StepReport
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import (
    CONTROL,
    EVALUATION_ORDERS,
    EVALUATION_SAMPLES,
    EVALUATIONS,
    HEARTBEATS,
    STEPS,
    Topic,
)
from streamrl.schemas.trajectories import SamplingParams, Trajectory

log = structlog.get_logger()

CLIENT_ID = "evaluator"
POLL_S = 0.5
RETRY_S = 0.5
AHEAD = 2
"""Samples ordered from a worker, as a multiple of its evaluation slots, so that no slot is idle between two orders."""


@dataclass(frozen=True)
class HeldOutTask:
    """What weights are evaluated on. ``read``: reads the prompts when the evaluator starts, which may take long.

    ``weights``: weight of each reward, by the reward's name. ``seed``: seed of the samples; None leaves it to the
    engines. ``max_unrewarded_share``: share of a version's completions whose rewards may fail.
    """

    read: Callable[[], HeldOutPrompts]
    settings: HeldOutSettings
    weights: Mapping[str, float]
    seed: int | None = None
    max_unrewarded_share: float = 1.0

    @cached_property
    def rule(self) -> PassRule:
        """What makes a completion pass."""
        return PassRule.of(self.settings.passes_at, self.weights)

    def sampling(self, loop: LoopSettings) -> SamplingParams:
        """Sampling parameters of its completions."""
        sampling, wanted = loop.sampling_params(self.seed), self.settings.temperature
        return sampling if wanted is None else sampling.model_copy(update={"temperature": wanted})

    def scored(self, trajectory: Trajectory) -> ScoredSample:
        """A completion as a scored sample."""
        return scored(trajectory, self.weights, self.rule)


@dataclass
class Evaluator:
    """The evaluator, one per run. ``metrics``: path of ``metrics.jsonl``.

    ``policies``: creates the view of the policies that share the stream; by default there is one policy.
    ``max_attempts`` is no setting of a run; tests lower it.
    """

    bus: Bus
    run_name: str
    loop: LoopSettings
    dispatch: DispatchSettings
    task: HeldOutTask
    metrics: Path
    clocks: Clocks = field(default_factory=Clocks)
    on_tick: Callable[[str], None] = lambda name: None
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch
    max_attempts: int = field(default=MAX_ATTEMPTS, init=False)
    state: EvaluationState = field(init=False)
    workers: LiveWorkers = field(init=False)
    reports: list[EvaluationReport] = field(init=False, default_factory=list)
    mode: str = field(init=False, default="run")
    run_is_over: bool = field(init=False, default=False)
    is_other_followed: bool = field(init=False, default=False)
    failures: FailedRewards = field(init=False)
    _read_through: int = field(init=False, default=-1)
    """Number of the last control message that was read as part of the past."""
    _policies: PolicyDispatch = field(init=False)

    def __post_init__(self) -> None:
        self._policies = self.policies()
        self.failures = FailedRewards(self.task.max_unrewarded_share)

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate the weights of every ``evaluation.every`` steps until the run is over.

        Consumes: steps of the announced policy and evaluation reports (both from the start), samples of the running
            evaluation, heartbeats, control.
        Produces: evaluation orders, evaluation reports, lines of ``metrics.jsonl``.
        Waits for: weights that are due; workers with those weights and with free slots.
        On failure: raises, also ``BadInput`` if rewards of held-out completions fail. After a restart the evaluator
            reads reports and samples from the topics, and orders the missing samples. ``Superseded``: another evaluator
            took over.
        On stop: ends within one poll. It also ends when the last weights are reported, or when the run is ended.
        """
        prompts = await in_thread(self.task.read)
        self.workers = LiveWorkers(self.loop.heartbeat_timeout_s)
        names = [topic.full_name(self.run_name) for topic in (EVALUATION_SAMPLES, HEARTBEATS, CONTROL)]
        # If a cancellation comes before both clients are open, or while one of them closes, the other is closed, too.
        async with AsyncExitStack() as clients:
            publisher = await self.bus.transactional(f"{self.run_name}.{CLIENT_ID}")
            clients.push_async_callback(publisher.close)
            # Opened before the past is read, so no record is missed in between. A record read twice counts once.
            others = await self.bus.subscribe(names, client_id=CLIENT_ID, start="latest")
            clients.push_async_callback(others.close)
            while await self._serve(publisher, await self._rebuild(prompts), others, stop):
                log.info("another policy is announced, its weights are evaluated from now on")
        log.info("evaluator ended", reported=len(self.state.reported), passed_over=self.state.passed_over)

    async def _rebuild(self, prompts: HeldOutPrompts) -> Positions:
        """Rebuild the state from the topics: reports, steps, and samples of the newest weights. Returns the position in
        the steps.
        """
        self.state = EvaluationState(prompts, self.task.settings, self.max_attempts)
        self.reports = []
        async for message in self._history(EVALUATIONS, {}):
            if isinstance(message, EvaluationReport):
                self._note_report(message)
        async for message in self._history(CONTROL, {}):
            self._recall(message)
        self.is_other_followed = False
        steps_from: Positions = {}
        async for message in self._history(STEPS, steps_from, self._policies.trainer_scope(self.run_name)):
            if isinstance(message, StepReport):
                self._note_step(message)
        self._start_due()
        if self.state.target is not None:
            async for message in self._history(EVALUATION_SAMPLES, {}):
                self._observe(message, self.clocks.monotonic())
        self._write()
        return steps_from

    def _recall(self, message: Message) -> None:
        """Process a control message of the past. An end of the run is ignored, since the run may have been resumed."""
        if isinstance(message, FlowControl):
            self.mode = message.mode
        if isinstance(message, Control):
            self._policies.observe(message)
            self._read_through = max(self._read_through, message.sequence)

    def _history(self, topic: Topic, positions: Positions, scope: str | None = None) -> AsyncIterator[Message]:
        return history(
            self.bus,
            [topic.full_name(scope or self.run_name)],
            "earliest",
            positions,
            client_id=CLIENT_ID,
            on_poll=lambda: self.on_tick("evaluate"),
        )

    async def _serve(
        self, publisher: TransactionalPublisher, steps_from: Positions, others: Subscription, stop: asyncio.Event
    ) -> bool:
        """Evaluate until the run is over, or another policy is announced; true in the second case."""
        topic = STEPS.full_name(self._policies.trainer_scope(self.run_name))
        steps = await self.bus.subscribe([topic], client_id=CLIENT_ID, start=steps_from)
        try:
            finished_at: float | None = None
            listening = HeartbeatReader(others, self.loop.heartbeat_timeout_s, self._extend, self.clocks.monotonic)
            while not stop.is_set() and not self.run_is_over:
                self.on_tick("evaluate")
                await self._read(steps, listening)
                if self.is_other_followed:
                    return True
                self._start_due()
                await self._order(publisher, stop)
                if (report := self.state.report(self.clocks.time_of_day())) is not None:
                    self.failures.end_version()
                    await self._commit(publisher, [self._record(report)], stop)
                    if stop.is_set():
                        return False
                    self._note_report(report)
                    self._write()
                    log.info("weights evaluated", version=str(report.version), **_passes(report))
                latest = self.state.latest
                if latest is None or not latest.finished:
                    finished_at = None
                elif self.state.is_idle:
                    return False
                else:
                    now = self.clocks.monotonic()
                    finished_at = now if finished_at is None else finished_at
                    if now - finished_at > PATIENCE_S:
                        log.warning("the run ends before its last weights are evaluated", version=str(latest.version))
                        return False
        finally:
            await steps.close()
        return False

    def _extend(self, seconds: float) -> None:
        self.workers.extend(seconds)
        self.state.extend(seconds)

    async def _read(self, steps: Subscription, others: HeartbeatReader) -> None:
        records = await others.poll(POLL_S)
        for record in [*await steps.poll(timeout_s=0.0), *records]:
            if (message := message_of(record)) is not None:
                self._observe(message, self.clocks.monotonic())

    def _observe(self, message: Message, at: float) -> None:
        match message:
            case StepReport():
                self._note_step(message)
            # Earlier control messages were processed as part of the past, except for an end of the run.
            case Control() if message.sequence > self._read_through or isinstance(message, RunFinished):
                self._follow_control(message)
            case Trajectory():
                if self.state.came(message.trajectory_id, self.task.scored(message)):
                    self.failures.add(message)
            case Heartbeat():
                self.workers.observe(message, at)
                # Read from each heartbeat, since the worker's latest one may already be of another policy.
                if declined := self.state.declined(message.worker_id, message.incarnation, message.declined):
                    log.info("held-out prompts declined", worker=message.worker_id, groups=len(declined))

    def _follow_control(self, message: Control) -> None:
        before = self._policies.left_after
        if self._policies.observe(message):
            self.is_other_followed = True
        last = self._policies.left_after
        # No worker will sample versions above ``last``, but some of those may be due.
        if last is not None and last != before and self.state.reaches_beyond(last):
            self.is_other_followed = True
        match message:
            case FlowControl():
                self.mode = message.mode
            case RunFinished():
                latest = self.state.latest
                self.run_is_over = latest is None or message.step >= latest.step

    def _note_step(self, report: StepReport) -> None:
        announced, last = self._policies.as_announced(report), self._policies.left_after
        if not announced.version.lineage:  # no worker sampled with this policy's weights then
            return
        if last is not None and announced.version > last:
            return
        self.state.stepped(announced)

    def _start_due(self) -> None:
        if (version := self.state.begin(self.clocks.time_of_day())) is not None:
            prompts, rule = len(self.state.held_out.prompts), str(self.task.rule)
            log.info("evaluation starts", version=str(version), prompts=prompts, passes=rule)

    async def _order(self, publisher: TransactionalPublisher, stop: asyncio.Event) -> None:
        """Take back groups that are late or whose worker was lost, and send groups to workers with room."""
        if self.state.target is None or self.mode != "run":
            return
        now = self.clocks.monotonic()
        for name, group in self.state.groups.items():
            timeout_s = self.dispatch.order_timeout_s * (1 << group.lost)
            if group.worker_id is None or not group.missing:
                continue
            is_gone = not self.workers.has(group.worker_id, group.incarnation, now)
            if is_gone or now - group.sent_at > timeout_s:
                log.warning("held-out prompt ordered again", group=name, worker=group.worker_id)
                self.state.take_back(name)
        unsent = iter(self.state.unsent())
        sampling, orders = self.task.sampling(self.loop), list[Outgoing]()
        for worker in sorted(self.workers.ready(now), key=lambda beat: self.state.outstanding(beat.worker_id)):
            # A worker with older weights will have newer ones soon. A worker of another policy has other weights. A
            # worker that has declined an order is about to follow another policy, and might decline the next one.
            if worker.policy or worker.declined or worker.version < self.state.target:
                continue
            room = AHEAD * self.task.settings.slots(worker.capacity) - self.state.outstanding(worker.worker_id)
            while room > 0 and (wanted := next(unsent, None)) is not None:
                order = self.state.order(
                    wanted, worker.worker_id, worker.incarnation, sampling, now, self.clocks.time_of_day()
                )
                room -= len(order.sample_indices)
                orders.append(Outgoing.of(EVALUATION_ORDERS.full_name(self.run_name), order, key=wanted))
        if orders:
            await self._commit(publisher, orders, stop)

    async def _commit(self, publisher: TransactionalPublisher, records: list[Outgoing], stop: asyncio.Event) -> None:
        # Sending twice is harmless: workers recognise an order by its samples, readers a report by its version.
        while not stop.is_set():
            self.on_tick("evaluate")
            try:
                await publisher.commit(records)
            except (DeliveryUnknown, BusUnavailable) as error:
                log.warning("evaluation records are sent again", records=len(records), error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _record(self, report: EvaluationReport) -> Outgoing:
        return Outgoing.of(EVALUATIONS.full_name(self.run_name), report, key=str(report.version))

    def _note_report(self, report: EvaluationReport) -> None:
        if report.version not in self.state.reported:
            self.reports.append(report)
        self.state.note_reported(report.version)

    def _write(self) -> None:
        """Write reports to the file, including those that a killed evaluator did not write."""
        try:
            append_evaluations(self.metrics, self.reports)
        except OSError as error:  # the topic has the reports, so the next evaluator writes them
            log.warning("evaluations were not written to the metrics file", path=str(self.metrics), error=str(error))


def _passes(report: EvaluationReport) -> dict[str, float]:
    return {name.removeprefix("eval/"): round(value, 4) for name, value in report.metrics.items() if "pass@" in name}
