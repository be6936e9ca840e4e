"""The worker's driver: reads work orders, delivers trajectories, adopts new weights. Knows no broker and no model.

``GenerationWorker`` opens the clients. ``WorkerSession`` runs the loops that share them. ``OrderExecutor`` turns orders
into tasks, and each task samples, scores and delivers one trajectory.

Invariants:
- no_order_is_missed: the worker subscribes to its partition before its first heartbeat makes it known;
- one_incarnation_per_id: every record passes the fence, which ends this incarnation when another takes over its id.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from streamrl.bus.clocks import Clocks
from streamrl.bus.port import Bus, Outgoing, Publisher, Record, Subscription
from streamrl.bus.waiting import wait_for_event
from streamrl.producers.generation.control import ControlFollower
from streamrl.producers.generation.engines.port import Engine, Interrupted, Tokenizer, encoded
from streamrl.producers.generation.heartbeat import Heartbeats, MeasureUsage
from streamrl.producers.generation.outbox import Fence, FencedPublisher, Outbox
from streamrl.producers.generation.pace import WorkerPace, pace_of
from streamrl.producers.generation.partials import PartialLog, PartialPool, PartialReader
from streamrl.producers.generation.releases import Releases
from streamrl.producers.generation.rollout import Rollout, SampledCompletion, TokenStream, WorkerLoad
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.side_work import HostWorker, SideWork, SideWorkFactory
from streamrl.producers.generation.status import WorkerStatus
from streamrl.producers.rewards.runner import RewardScorer
from streamrl.schemas.codec import CONTINUATIONS_HEADER
from streamrl.schemas.errors import PromptRefused, WireError
from streamrl.schemas.identifiers import group_id_of, make_trajectory_id, partition_of_worker
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import (
    CONTROL,
    HEARTBEATS,
    PARTIAL_TRAJECTORIES,
    TOKENS,
    TRAJECTORIES,
    UNGRADED,
    WORK_ORDERS,
)
from streamrl.schemas.trajectories import (
    FinishedCompletion,
    FinishReason,
    ReleaseOrder,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
)
from streamrl.weights.adopt import WeightsAdopter
from streamrl.weights.fetch import WeightsFetcher
from streamrl.weights.series import OwnSeries, WantedSeries

log = structlog.get_logger()

POLL_S = 0.5
GATE_S = 0.1
"""Seconds between two checks whether orders may be taken again: the longest wait of an idle slot after a pause."""
LAST_BEAT_S = 2.0
LAST_CHUNKS_S = 2.0
"""Seconds to write the tokens of unfinished completions before they are abandoned."""
ORDERS_PER_POLL = 32
LOGGED_REFUSALS = 4


@dataclass(frozen=True)
class RunContext:
    """The run that a worker samples for, shared by all of its workers.

    ``run_id``: id of the run in the worker's run directory, None without such a directory. ``has_graders``: whether
    graders score the trajectories after the worker. ``wanted_series``: creates the object that decides which series of
    weights a worker follows. ``pace``: how often a worker reports, from the loop. ``usage``: measures this process.
    """

    name: str
    loop: LoopSettings
    generation: GenerationSettings
    run_id: str | None = None
    has_graders: bool = False
    wanted_series: Callable[[], WantedSeries] = OwnSeries
    pace: Callable[[LoopSettings], WorkerPace] = pace_of
    usage: MeasureUsage = lambda: None


@dataclass
class GenerationWorker:
    """The worker, one per process. ``on_tick`` is called with a loop's name at each turn of that loop."""

    bus: Bus
    context: RunContext
    worker_id: str
    engine: Engine
    tokenizer: Tokenizer
    rewards: RewardScorer
    fetcher: WeightsFetcher
    side_work: Sequence[SideWorkFactory] = ()
    clocks: Clocks = field(default_factory=Clocks)
    on_tick: Callable[[str], None] = lambda name: None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped, drained, or the run is finished.

        Consumes: this worker's partition of work-orders (from now on), control (from the start), and its side work's
            topics.
        Produces: trajectories, heartbeats, tokens if the settings say so, and its side work's records.
        Waits for: the first weights; orders; the broker when it is behind.
        On failure: raises (``EngineError``, ``ModelError``, ``RewardLoadError``, ``BusError``) after a last heartbeat;
            other workers get its unfinished orders. ``Superseded``, without a last heartbeat: another process has
            this id.
        On stop: accepts no more orders, gives running samples the grace period and abandons the rest. If partial
            trajectories are durable, other workers continue the abandoned samples from their last token.
        """
        client_id = f"worker-{self.worker_id}"
        # The partition is subscribed to first: see no_order_is_missed. Clients are closed in reverse order: side work,
        # then the engine, which ends completions, then the rewards, and the publisher after all of these.
        async with AsyncExitStack() as stack:
            work_orders = await self.bus.subscribe(
                [WORK_ORDERS.full_name(self.context.name)],
                client_id=client_id,
                start="latest",
                partitions=[partition_of_worker(self.worker_id)],
            )
            stack.push_async_callback(work_orders.close)
            control = await self.bus.subscribe([CONTROL.full_name(self.context.name)], client_id=client_id)
            stack.push_async_callback(control.close)
            publisher = await self.bus.publisher(client_id)
            stack.push_async_callback(publisher.close)
            stack.push_async_callback(self.rewards.close)
            stack.push_async_callback(self.engine.close)
            session = WorkerSession.open(self, work_orders, control, publisher)
            for work in session.side_work:
                stack.push_async_callback(work.close)
                await work.subscribe()
            try:
                await session.work(stop)
            except BaseExceptionGroup as group:
                # Callers distinguish errors by their type, which the task group's wrapper would hide.
                raise _first_of(group) from group
            finally:
                await session.sign_off()


@dataclass
class WorkerSession:
    """One incarnation of a worker: its open clients, and the loops that share them."""

    worker: GenerationWorker
    pace: WorkerPace
    status: WorkerStatus
    work_orders: Subscription
    control: ControlFollower
    adopter: WeightsAdopter
    heartbeats: Heartbeats
    executor: "OrderExecutor"
    side_work: Sequence[SideWork]

    @classmethod
    def open(
        cls, worker: GenerationWorker, work_orders: Subscription, control: Subscription, publisher: Publisher
    ) -> "WorkerSession":
        """Build the parts, each after the parts that it uses. All records are published through the fence."""
        context, generation, clocks, engine = worker.context, worker.context.generation, worker.clocks, worker.engine
        status, pace = WorkerStatus(), context.pace(context.loop)
        fence = Fence(worker.worker_id, uuid.uuid4().hex[:12], pace.fencing_timeout_s, clocks.monotonic)
        fenced = FencedPublisher(publisher, fence)
        outbox = Outbox(fenced, pace.max_undelivered)
        capacity = engine.max_num_seqs - sum(one.reserved_slots for one in worker.side_work)
        rollout = cls._open_rollout(worker, fenced, pace, capacity)
        partials = cls._open_partials(worker, fenced, pace, status)
        longest, topic = context.loop.max_prompt_length, TRAJECTORIES.full_name(context.name)
        releases = Releases(engine, partials, status) if partials is not None else None
        ungraded = UNGRADED.full_name(context.name) if context.has_graders else None
        executor = OrderExecutor(rollout, outbox, topic, longest, status, partials, releases, ungraded)
        host = HostWorker(worker.bus, context.name, fence.incarnation, longest, rollout, outbox, status, worker.on_tick)
        side_work = [one.build(host) for one in worker.side_work]

        async def until_idle() -> None:
            """Return when the engine runs no sample that must not change weights."""
            await executor.until_idle()
            # Before a change of policy side work must be idle, too: no sample may have weights of two policies.
            if status.has_arm_weights:
                for work in side_work:
                    await work.until_idle()

        adopter = WeightsAdopter(engine, worker.fetcher, status, until_idle, only_idle=generation.adopt == "idle")
        wanted = context.wanted_series()
        follower = ControlFollower(
            control, fence, adopter, status, worker.on_tick, context.name, context.run_id, wanted
        )
        heartbeats = Heartbeats(
            fenced,
            HEARTBEATS.full_name(context.name),
            worker.worker_id,
            fence.incarnation,
            engine,
            capacity,
            rollout.load,
            status,
            clocks.time_of_day,
            context.usage,
        )
        return cls(worker, pace, status, work_orders, follower, adopter, heartbeats, executor, side_work)

    @staticmethod
    def _open_rollout(worker: GenerationWorker, fenced: FencedPublisher, pace: WorkerPace, capacity: int) -> Rollout:
        partials, topic = worker.context.generation.partial_trajectories, TOKENS.full_name(worker.context.name)
        return Rollout(
            worker.engine,
            worker.tokenizer,
            worker.rewards,
            worker.worker_id,
            WorkerLoad(worker.clocks.monotonic),
            TokenStream(fenced, topic, worker.worker_id) if partials == "stream" else None,
            worker.clocks.time_of_day,
            # Without reserved slots, the engine itself queues the samples for which it has no slot.
            asyncio.Semaphore(capacity) if capacity < worker.engine.max_num_seqs else nullcontext(),
            pace.durable_chunk_tokens if partials == "durable" else None,
        )

    @staticmethod
    def _open_partials(
        worker: GenerationWorker, fenced: FencedPublisher, pace: WorkerPace, status: WorkerStatus
    ) -> PartialPool | None:
        if worker.context.generation.partial_trajectories != "durable":
            return None
        topic = PARTIAL_TRAJECTORIES.full_name(worker.context.name)
        return PartialPool(
            fenced,
            PartialReader(worker.bus, topic, f"worker-{worker.worker_id}-partials"),
            topic,
            worker.worker_id,
            fenced.fence.incarnation,
            pace.partial_chunk_tokens,
            pace.partial_chunk_s,
            status,
            worker.clocks.monotonic,
        )

    async def work(self, stop: asyncio.Event) -> None:
        """Start the parts, execute orders until the worker has to leave, then finish."""
        if self.executor.partials is not None:
            await self.executor.partials.open()
        async with asyncio.TaskGroup() as tasks:
            # Started first: if this process or the broker was suspended, nothing is sent before control is read.
            background = [tasks.create_task(self.control.control_loop())]
            # Sent before the model is loaded, which may take minutes, so that the coordinator can claim the id for us.
            await self.heartbeats.beat()
            beating = self.heartbeats.heartbeat_loop(self.pace.heartbeat_interval_s)
            background.append(tasks.create_task(beating))
            if (tokens := self.executor.rollout.tokens) is not None:
                background.append(tasks.create_task(tokens.publish_loop()))
            if await _done_before(stop, self._start_parts()):
                background.append(tasks.create_task(self.adopter.adopt_loop()))
                for work in self.side_work:
                    background += [tasks.create_task(loop) for loop in await work.begin()]
                await self._orders_loop(stop, tasks)
                await self._finish(stop)
            # The task group ends with its last task, and these would run forever.
            for task in background:
                task.cancel()

    async def _start_parts(self) -> None:
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self.worker.engine.start())
            starting.create_task(self.worker.rewards.start())
        log.info("worker ready for weights", worker=self.worker.worker_id, engine=self.worker.engine.name)

    async def _orders_loop(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Start the samples of work orders until the worker has to leave.

        Consumes: work orders. Produces: tasks of the group.
        Waits for: weights, permission to start, room in the outbox; orders stay on the topic in the meantime. Also for
            the adoption of weights that waited until nothing runs: orders that arrive then run with those weights.
        On failure: a record that cannot be decoded is logged and skipped; a failing bus raises.
        On stop: returns within one poll.
        """
        while not stop.is_set() and not self.control.leaving:
            self.worker.on_tick("orders")
            state = self._state()
            self.status.set_state(state)
            # Orders stay on the topic: the dispatcher sees the state and gives them to other workers.
            if state is not WorkerState.READY:
                await wait_for_event(stop, GATE_S)
                continue
            records = await self.work_orders.poll(max_records=ORDERS_PER_POLL, timeout_s=POLL_S)
            await self.adopter.completions_may_start.wait()
            for record in (*self.executor.take_deferred(), *records):
                self.executor.accept(record, tasks)

    def _state(self) -> WorkerState:
        if self.adopter.held is None:
            return WorkerState.STARTING
        if not self.control.may_start or self.executor.outbox.is_full:
            return WorkerState.PAUSED
        return WorkerState.READY

    async def _finish(self, stop: asyncio.Event) -> None:
        """Wait for running samples: for the grace period when stopped, without a limit when drained.

        If only this worker is drained and others can continue its samples, it also waits for the grace period only.
        """
        self.status.set_state(WorkerState.DRAINING)
        loop, deadline = asyncio.get_running_loop(), None
        idle = [loop.create_task(work.until_idle()) for work in self.side_work if work.holds_up_leaving]
        # A finished run is not waited for: no trainer is left for the running samples.
        while (left_over := [*self.executor.running.values(), *(task for task in idle if not task.done())]) and (
            not self.control.finished
        ):
            self.worker.on_tick("orders")
            hands_over = self.control.drained and self.executor.partials is not None
            if (stop.is_set() or hands_over) and deadline is None:
                deadline = loop.time() + self.pace.drain_grace_s
            left = POLL_S if deadline is None else min(POLL_S, deadline - loop.time())
            if left <= 0:
                break
            await asyncio.wait(left_over, timeout=left)
        for task in idle:
            task.cancel()
        await self.executor.abandon(is_wanted=not self.control.finished)

    async def sign_off(self) -> None:
        """Send a last heartbeat, so that others need not wait for the worker's lease to end. Bounded in time."""
        if self.control.fence.superseded is not None:
            return  # another incarnation has the id: this heartbeat would report that one as gone
        self.status.set_state(WorkerState.STOPPED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_BEAT_S):
                await self.heartbeats.beat()


@dataclass
class OrderExecutor:
    """Executes work orders: each sample becomes a task that ends when the broker has its trajectory.

    The methods are in the order of an order's way: ``accept`` starts a ``_produce`` for each sample, which delivers its
    ``_record``.

    ``partials``: the records of unfinished completions, if the settings want them; then ``releases`` has the orders
    that were taken back. ``ungraded``: the topic for graders, if there are any. ``status`` names the policy of the
    engine's weights: samples belong to that policy, even if their order names another. ``running``: the tasks by
    trajectory id; a task's result is true if it delivered. ``refused``: number of orders with an unusable prompt.
    """

    rollout: Rollout
    outbox: Outbox
    topic: str
    max_prompt_length: int
    status: WorkerStatus
    partials: PartialPool | None = None
    releases: Releases | None = None
    ungraded: str | None = None
    running: "dict[str, asyncio.Task[bool]]" = field(init=False, default_factory=dict)
    refused: int = field(init=False, default=0)
    _logs: dict[str, PartialLog] = field(init=False, default_factory=dict)
    _completions: dict[str, SampledCompletion] = field(init=False, default_factory=dict)
    _delivering: set[str] = field(init=False, default_factory=set)
    _releasing: "dict[tuple[str, int], asyncio.Task[None]]" = field(init=False, default_factory=dict)
    """By group and attempt."""
    _deferred: list[Record] = field(init=False, default_factory=list)

    def accept(self, record: Record, tasks: asyncio.TaskGroup) -> None:
        """Start the samples of an order for this worker that are not running yet; or release orders."""
        try:
            order = record.message()
        except WireError as error:
            log.error(
                "a work order cannot be decoded", partition=record.partition, offset=record.offset, error=str(error)
            )
            return
        # A partition is a hash of a worker id, so workers may share one, and some of its orders are for others.
        if not isinstance(order, WorkOrder | ReleaseOrder) or order.worker_id != self.rollout.worker_id:
            return
        if isinstance(order, ReleaseOrder):
            self._take_back(order, tasks)
            return
        if self.releases is not None and self.releases.is_taken_back(order.group_id, order.attempt):
            return
        # A later attempt waits until the earlier one is released, so that their samples do not mix.
        if any(group_id == order.group_id for group_id, _ in self._releasing):
            self._deferred.append(record)
            return
        # The worker may have changed arms since the order was sent. No other policy's weights come while it runs.
        policy = self.status.policy
        order = order if order.policy == policy else order.replace(policy=policy)
        prompt: Sequence[int] | PromptRefused
        try:
            prompt = encoded(self.rollout.tokenizer, order.prompt, self.max_prompt_length)
        except PromptRefused as refusal:
            prompt = refusal
        for index in order.sample_indices:
            trajectory_id = make_trajectory_id(order.group_id, index)
            # A restarted dispatcher may send an order again; its samples are running already.
            if trajectory_id not in self.running:
                task = tasks.create_task(self._produce(order, index, prompt), name=trajectory_id)
                self.running[trajectory_id] = task
                self.rollout.load.took(trajectory_id)
                task.add_done_callback(self._forget)

    async def _produce(self, order: WorkOrder, index: int, prompt: Sequence[int] | PromptRefused) -> bool:
        """Sample, score and deliver one trajectory. False if it was interrupted, and so not delivered."""
        trajectory_id = make_trajectory_id(order.group_id, index)
        # A task has its own context, so this applies only to log lines about this trajectory.
        structlog.contextvars.bind_contextvars(trajectory=trajectory_id)
        partial_log: PartialLog | None = None
        try:
            if isinstance(prompt, PromptRefused):
                raise prompt  # the tokenizer refused it; below, the engine may refuse it
            if self.partials is None:
                completion = self._completions[trajectory_id] = SampledCompletion()
                trajectory = await self.rollout.sample(order, index, prompt, completion)
            else:
                partial_log = self._logs[trajectory_id] = await self.partials.begin(order, index, prompt)
                self._completions[trajectory_id] = partial_log.completion
                trajectory = await self.rollout.sample(order, index, prompt, partial_log.completion, partial_log.grown)
        except PromptRefused as refusal:
            if index == order.sample_indices[0]:
                self._note_refused(order, refusal)
            trajectory = self.rollout.refused(order, index, str(refusal), refusal.cause)
        except Interrupted:  # only samples with durable partial trajectories are interrupted
            return False
        self._delivering.add(trajectory_id)
        await self.outbox.deliver(self._record(order, trajectory))
        if partial_log is not None:
            partial_log.close()
        self.rollout.load.finished_trajectories += 1
        return True

    def _record(self, order: WorkOrder, trajectory: Trajectory) -> Outgoing:
        """The trajectory's record, for graders if there are any."""
        try:
            topic = self.topic
            message: FinishedCompletion = trajectory
            # Graders add to the worker's rewards, so a trajectory without tokens or rewards does not go to them.
            is_scored = trajectory.finish_reason is not FinishReason.ABORT and not trajectory.reward_errors
            if self.ungraded is not None and is_scored:
                topic, message = self.ungraded, UngradedTrajectory.of(trajectory, order.prompt)
            record = Outgoing.of(topic, message, key=order.group_id, partition=order.partition)
            if (continued := len(trajectory.parts) - 1) > 0:
                record = record._replace(headers=(*record.headers, (CONTINUATIONS_HEADER, str(continued).encode())))
            return record
        except WireError as error:  # it is larger than a record may be; an empty one completes the group in its place
            log.error("trajectory cannot be sent", trajectory=trajectory.trajectory_id, error=str(error))
            refused = self.rollout.refused(order, trajectory.sample_index, str(error))
            return Outgoing.of(self.topic, refused, key=order.group_id, partition=order.partition)

    def _forget(self, task: "asyncio.Task[bool]") -> None:
        del self.running[task.get_name()]
        self._logs.pop(task.get_name(), None)
        self._completions.pop(task.get_name(), None)
        self._delivering.discard(task.get_name())
        self.rollout.load.let_go(task.get_name())

    def _note_refused(self, order: WorkOrder, refusal: PromptRefused) -> None:
        self.refused += 1
        # Logs the first refusals, then each time that their number has doubled: a data set may have many.
        if self.refused <= LOGGED_REFUSALS or self.refused & (self.refused - 1) == 0:
            log.warning("prompt refused", prompt=order.prompt.prompt_id, reason=str(refusal), refused=self.refused)

    def _take_back(self, release: ReleaseOrder, tasks: asyncio.TaskGroup) -> None:
        """Release the orders that the dispatcher takes back."""
        # The release may be for an earlier process: its samples are lost, and the dispatcher knows that.
        if self.releases is None or release.incarnation != self.releases.pool.incarnation:
            return
        self.releases.settle(release.settled)
        for group_id, attempt in release.groups.items():
            if self.releases.is_taken_back(group_id, attempt):
                continue
            names = [name for name in self.running if group_id_of(name) == group_id and not self._is_sampled(name)]
            own = {name: self.running[name] for name in names}
            logs = {name: self._logs[name] for name in own if name in self._logs}
            releasing = tasks.create_task(self.releases.take_back(group_id, attempt, own, logs))
            self._releasing[group_id, attempt] = releasing
            releasing.add_done_callback(partial(self._forget_release, group_id, attempt))

    def _forget_release(self, group_id: str, attempt: int, _: "asyncio.Task[None]") -> None:
        del self._releasing[group_id, attempt]

    def take_deferred(self) -> list[Record]:
        """Take the orders that were deferred during a release. ``accept`` defers them again if necessary."""
        records, self._deferred = self._deferred, []
        return records

    def _is_sampled(self, name: str) -> bool:
        """Whether a sample has its last token: it is being scored or delivered."""
        completion = self._completions.get(name)
        return name in self._delivering or (completion is not None and completion.finish_reason is not None)

    async def until_idle(self) -> None:
        """Return when no sample is in the engine. Complete ones, which wait for rewards or the broker, do not count."""
        while sampling := [task for name, task in self.running.items() if not self._is_sampled(name)]:
            # Polls, since a task goes on after its last token.
            await asyncio.wait(sampling, timeout=GATE_S, return_when=asyncio.FIRST_COMPLETED)

    async def abandon(self, *, is_wanted: bool = True) -> None:
        """Cancel running samples. Their trajectories are not published, so that other workers can get the orders.

        ``is_wanted``: whether other workers will continue them. If so, their tokens are written before this returns.
        """
        for releasing in self._releasing.values():
            releasing.cancel()
        left = [*self.running.values()]
        for task in left:
            task.cancel()
        if left:
            why = "other workers continue them" if is_wanted else "the run is finished"
            log.info("unfinished completions abandoned", count=len(left), reason=why)
            await asyncio.wait(left)
        if self.partials is not None:
            if is_wanted:
                await self.partials.flush(LAST_CHUNKS_S)
            self.partials.close()


async def _done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` unless ``stop`` comes first, which cancels it; whether it ended."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()  # raises the work's exception, which ``asyncio.wait`` does not
        return working.done()
    finally:
        for task in (working, stopping):
            task.cancel()
        # ``cancel`` only requests it: they are awaited, so that nothing of the work runs when this returns.
        await asyncio.wait({working, stopping})


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
