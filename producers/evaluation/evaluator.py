"""The evaluator's driver: reads the topics, orders samples of held-out prompts, reports what weights came to.

Invariants:
- evaluation_trains_nothing: its orders and samples are on topics of their own, which neither dispatcher nor trainer
  reads; so admission, staleness, the ledger and the audit do not know of them;
- training_is_not_held_up: a worker gives evaluation at most a share of its slots (``evaluation.share``), and is sent
  little more than it can sample at a time;
- one_evaluator_reports: reports are committed under one transactional id, whose newest holder fences the others;
- a_promotion_is_not_missed: what is said while the past is read is heard behind it. If another policy's weights are to
  follow, no weights of this one count that were never announced.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from streamrl.bus.clocks import Clocks
from streamrl.bus.listening import Listening
from streamrl.bus.port import Bus, Outgoing, Subscription, TransactionalPublisher, message_of
from streamrl.bus.waiting import in_thread
from streamrl.producers.dispatch.fleet import LiveWorkers
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.recovery import Positions, history
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.evaluation.results import ScoredSample, append_evaluations, scored
from streamrl.producers.evaluation.settings import HeldOutSettings
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
"""Samples at a worker, as a multiple of what it samples at a time: its slots are not idle between two orders."""


@dataclass(frozen=True)
class HeldOutTask:
    """What weights are evaluated on. ``read``: called when the run begins, since a data set may take long.

    ``weights``: of the rewards, by name. ``seed``: what the samples' random numbers are drawn from; none leaves that to
    the engines.
    """

    read: Callable[[], HeldOutPrompts]
    settings: HeldOutSettings
    weights: Mapping[str, float]
    seed: int | None = None

    def sampling(self, loop: LoopSettings) -> SamplingParams:
        """How its completions are sampled."""
        sampling, wanted = loop.sampling_params(self.seed), self.settings.temperature
        return sampling if wanted is None else sampling.model_copy(update={"temperature": wanted})

    def scored(self, trajectory: Trajectory) -> ScoredSample:
        """What one of them came to."""
        return scored(trajectory, self.weights, self.settings.passes_at)


@dataclass
class Evaluator:
    """One per run. ``metrics``: the file.

    ``policies`` makes what answers questions that depend on how many policies share the stream; by default there is
    one.
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
    state: EvaluationState = field(init=False)
    workers: LiveWorkers = field(init=False)
    reports: list[EvaluationReport] = field(init=False, default_factory=list)
    mode: str = field(init=False, default="run")
    run_is_over: bool = field(init=False, default=False)
    is_other_followed: bool = field(init=False, default=False)
    _read_through: int = field(init=False, default=-1)
    """Number of the last control message that was read as part of the past."""
    _policies: PolicyDispatch = field(init=False)

    def __post_init__(self) -> None:
        self._policies = self.policies()

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate the weights of every so many steps until the run is over.

        Consumes: steps of the policy that is announced and reports (from the beginning), samples of what is under way,
            heartbeats, control.
        Produces: evaluation orders, evaluation reports, lines of ``metrics.jsonl``.
        Waits for: weights that are due; workers that hold them, and have room.
        On failure: raises; a restart finds on the topics what was reported and sampled, and orders what is missing.
            ``Superseded``: another evaluator took over.
        On stop: ends within one poll. It ends by itself once the last weights are reported, or when the run is ended.
        """
        prompts = await in_thread(self.task.read)
        self.workers = LiveWorkers(self.loop.heartbeat_timeout_s)
        names = [topic.full_name(self.run_name) for topic in (EVALUATION_SAMPLES, HEARTBEATS, CONTROL)]
        # A cancellation may come before both clients are open, or while one of them is closed: the other is closed too.
        async with AsyncExitStack() as clients:
            publisher = await self.bus.transactional(f"{self.run_name}.{CLIENT_ID}")
            clients.push_async_callback(publisher.close)
            # Opened once, before the past is read: no record that comes meanwhile is missed; one in both counts once.
            others = await self.bus.subscribe(names, client_id=CLIENT_ID, start="latest")
            clients.push_async_callback(others.close)
            while await self._serve(publisher, await self._rebuild(prompts), others, stop):
                log.info("another policy is announced: its weights are evaluated from now on")
        log.info("evaluator ended", reported=len(self.state.reported), passed_over=self.state.passed_over)

    async def _rebuild(self, prompts: HeldOutPrompts) -> Positions:
        """What was reported, which weights there are, and which of the newest ones' samples have come; where the steps
        that were read end.
        """
        self.state = EvaluationState(prompts, self.task.settings, self.dispatch.max_attempts)
        self.reports = []
        async for message in self._history(EVALUATIONS, {}):
            if isinstance(message, EvaluationReport):
                self._reported(message)
        async for message in self._history(CONTROL, {}):
            self._recall(message)
        self.is_other_followed = False
        steps_from: Positions = {}
        async for message in self._history(STEPS, steps_from, self._policies.trainer_scope(self.run_name)):
            if isinstance(message, StepReport):
                self._stepped(message)
        self._begin()
        if self.state.target is not None:
            async for message in self._history(EVALUATION_SAMPLES, {}):
                self._observe(message, self.clocks.monotonic())
        self._write()
        return steps_from

    def _recall(self, message: Message) -> None:
        """Take a control message of the past into account; an end of the run is not believed, for it may go on."""
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
        """Evaluate until the end; true if another policy is announced instead."""
        topic = STEPS.full_name(self._policies.trainer_scope(self.run_name))
        steps = await self.bus.subscribe([topic], client_id=CLIENT_ID, start=steps_from)
        try:
            finished_at: float | None = None
            listening = Listening(others, self.loop.heartbeat_timeout_s, self._extend, self.clocks.monotonic)
            while not stop.is_set() and not self.run_is_over:
                self.on_tick("evaluate")
                await self._read(steps, listening)
                if self.is_other_followed:
                    return True
                self._begin()
                await self._order(publisher, stop)
                if (report := self.state.report(self.clocks.time_of_day())) is not None:
                    await self._commit(publisher, [self._record(report)], stop)
                    if stop.is_set():
                        return False
                    self._reported(report)
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
                    if now - finished_at > self.task.settings.patience_s:
                        log.warning("the run ends before its last weights are evaluated", version=str(latest.version))
                        return False
        finally:
            await steps.close()
        return False

    def _extend(self, seconds: float) -> None:
        self.workers.extend(seconds)
        self.state.extend(seconds)

    async def _read(self, steps: Subscription, others: Listening) -> None:
        records = await others.poll(POLL_S)
        for record in [*await steps.poll(timeout_s=0.0), *records]:
            if (message := message_of(record)) is not None:
                self._observe(message, self.clocks.monotonic())

    def _observe(self, message: Message, at: float) -> None:
        match message:
            case StepReport():
                self._stepped(message)
            # Others were said while the past was read, of which they were a part; an end was not believed there.
            case Control() if message.sequence > self._read_through or isinstance(message, RunFinished):
                self._told(message)
            case Trajectory():
                self.state.came(message.trajectory_id, self.task.scored(message))
            case Heartbeat():
                self.workers.observe(message, at)
                # Of each heartbeat, and not of the last one only: a worker may have had another policy's since.
                if declined := self.state.declined(message.worker_id, message.incarnation, message.declined):
                    log.info("held-out prompts declined", worker=message.worker_id, groups=len(declined))

    def _told(self, message: Control) -> None:
        before = self._policies.left_after
        if self._policies.observe(message):
            self.is_other_followed = True
        last = self._policies.left_after
        # No worker will sample versions above the last one; those that another policy replaced may still be due.
        if last is not None and last != before and self.state.reaches_beyond(last):
            self.is_other_followed = True
        match message:
            case FlowControl():
                self.mode = message.mode
            case RunFinished():
                latest = self.state.latest
                self.run_is_over = latest is None or message.step >= latest.step

    def _stepped(self, report: StepReport) -> None:
        announced, last = self._policies.as_announced(report), self._policies.left_after
        if not announced.version.lineage:  # of a time when nobody sampled with this policy's weights
            return
        if last is not None and announced.version > last:
            return
        self.state.stepped(announced)

    def _begin(self) -> None:
        if (version := self.state.begin(self.clocks.time_of_day())) is not None:
            log.info("evaluation begins", version=str(version), prompts=len(self.state.held_out.prompts))

    async def _order(self, publisher: TransactionalPublisher, stop: asyncio.Event) -> None:
        """Take back what was lost, and send what a worker has room for."""
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
            # Older weights than those that are evaluated: it will have newer ones soon. Of another policy, it has other
            # weights, or is about to: as long as it says that it declined an order, it gets none that it may decline.
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
        # Sent again, an order is known to its worker by its samples, and a report to its readers by its version.
        while not stop.is_set():
            self.on_tick("evaluate")
            try:
                await publisher.commit(records)
            except (DeliveryUnknown, BusUnavailable) as error:
                log.warning("evaluation sent again", records=len(records), error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _record(self, report: EvaluationReport) -> Outgoing:
        return Outgoing.of(EVALUATIONS.full_name(self.run_name), report, key=str(report.version))

    def _reported(self, report: EvaluationReport) -> None:
        if report.version not in self.state.reported:
            self.reports.append(report)
        self.state.was_reported(report.version)

    def _write(self) -> None:
        """Bring what was reported into the file: also what an evaluator before this one was killed before writing."""
        try:
            append_evaluations(self.metrics, self.reports)
        except OSError as error:  # the topic has it; who starts next writes it
            log.warning("evaluations are not in the file of metrics", path=str(self.metrics), error=str(error))


def _passes(report: EvaluationReport) -> dict[str, float]:
    return {name.removeprefix("eval/"): round(value, 4) for name, value in report.metrics.items() if "pass@" in name}
