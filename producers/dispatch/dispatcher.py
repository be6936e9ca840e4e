"""The dispatcher's loop: it reads the topics and sends orders. ``DispatchState`` decides which orders to send.

Invariants:
- every_drawn_prompt_is_ordered: prompts are drawn by position. A window is sent completely before the next one is
  drawn, and the orders of a turn are committed in one transaction before the next turn. So prompts that an exiting
  dispatcher left unsent are at most one window below the cursor. The next dispatcher finds them there and sends them
  first. A ``PromptChooser`` may pass over a prompt; then an order reports its position;
- every_group_is_completed: if no worker delivers a sample in ``max_attempts`` orders, the dispatcher publishes it as an
  aborted sample. So consumers can wait for every sample of a group without a clock;
- only_the_newest_dispatcher_sends_orders: all dispatchers of a run use one transactional id, and the newest holder
  fences the older ones. A dispatcher that was stalled while another took over sends no more orders.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from streamrl.bus.clocks import Clocks
from streamrl.bus.listening import HeartbeatReader
from streamrl.bus.port import Bus, Outgoing, Subscription, TransactionalPublisher, message_of
from streamrl.bus.waiting import in_thread
from streamrl.producers.dispatch.choosing import EveryPrompt, PromptChooser
from streamrl.producers.dispatch.fleet import MAX_ATTEMPTS, Candidate, Flight
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.recovery import CLIENT_ID, rebuild
from streamrl.producers.dispatch.repack import Repacker
from streamrl.producers.dispatch.scheduler import PendingPrompt, Schedulers
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState, OtherRoles
from streamrl.producers.dispatch.status import DispatcherStatus, status_of
from streamrl.producers.lengths.predictor import LengthPredictor
from streamrl.producers.prompts.sources import PromptSource
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown
from streamrl.schemas.identifiers import make_group_id, partition_of_worker
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, UNGRADED, WORK_ORDERS
from streamrl.schemas.trajectories import PartialSource, Prompt, ReleaseOrder, WorkOrder

log = structlog.get_logger()

POLL_S = 0.25
"""Longest wait in seconds for new records. Also the shortest time between two checks for lost orders."""
ORDERS_PER_TURN = 512
"""Most orders in one transaction. Between two turns the dispatcher reads heartbeats and results."""
LOG_INTERVAL_S = 10.0
"""Seconds between two progress lines in the log."""
TURN_BYTES = 8 << 20
"""Most bytes of work orders in one transaction: a commit must end well within its time-out, and turns must be short."""
RETRY_S = 0.5
"""Seconds between two attempts to commit the same orders."""
LARGE_PLAN = 512
"""Items × workers above which a plan is made in a thread. Smaller plans take less time than starting a thread."""
SLICE = 64
"""Prompts drawn before other tasks get a chance to run."""
SLOW_S = 0.1
"""Windows that take more seconds than this to draw are drawn ahead. Also the time limit for renewing estimates."""


@dataclass
class Dispatcher:
    """Sends a run's prompts to its workers. A second dispatcher supersedes the first; a restart rebuilds all state
    from the topics.

    ``on_tick`` is called with the loop's name at every turn of a loop. ``policies`` makes the object that answers
    questions about the policies that share the stream; the default is for one policy. ``chooser`` makes the object that
    decides which prompts are ordered; by default all are. ``poll_s``, ``orders_per_turn`` and ``max_attempts`` are no
    settings of a run; tests shorten them.
    """

    bus: Bus
    run_name: str
    loop: LoopSettings
    settings: DispatchSettings
    source: PromptSource
    predictor: LengthPredictor
    clocks: Clocks = field(default_factory=Clocks)
    roles: OtherRoles = field(default_factory=OtherRoles)
    on_tick: Callable[[str], None] = lambda name: None
    policies: Callable[[], PolicyDispatch] = OnePolicyDispatch
    chooser: Callable[[], PromptChooser] = EveryPrompt
    poll_s: float = field(default=POLL_S, init=False)
    orders_per_turn: int = field(default=ORDERS_PER_TURN, init=False)
    max_attempts: int = field(default=MAX_ATTEMPTS, init=False)
    state: DispatchState = field(init=False)
    scheduler: Schedulers = field(init=False)
    repacker: Repacker = field(init=False)
    _prefetcher: "PromptPrefetcher" = field(init=False)
    _checked_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.state = DispatchState(
            self.loop, self.settings, self.predictor, self.roles, self.policies(), self.chooser()
        )
        self.repacker = Repacker(self.state)
        self.scheduler = Schedulers(self.state, self.settings)
        self._prefetcher = PromptPrefetcher(
            self.source, self.predictor, self.clocks.monotonic, lambda: self.on_tick("dispatch")
        )

    def status(self) -> DispatcherStatus:
        """A snapshot of orders, plans and workers."""
        return status_of(self.state, self.scheduler, self.clocks.monotonic())

    async def run(self, stop: asyncio.Event) -> None:
        """Send prompts to the workers as far as the staleness bound allows.

        Consumes: heartbeats, trajectories and control; steps and skips of the trainer that ends groups; at the start
            also the run's work orders.
        Produces: work orders; aborted trajectories for samples that were given up.
        Waits for: room under the staleness bound and a worker with free slots.
        On failure: raises; a restart rebuilds the state and continues at the same prompt. ``Superseded``: another
            dispatcher took over.
        On stop: returns within one poll and one transaction, as it does when the run has finished or is drained.
        """
        publisher = await self.bus.transactional(f"{self.run_name}.{CLIENT_ID}")
        try:
            # Each pass rebuilds the state: untrained samples may expire from the topic while the dispatcher serves.
            while await self._rebuild_and_serve(publisher, stop):
                why = "samples expired before they were trained, or the trainer went far back"
                why = "another policy is served" if self.state.has_other_trainer else why
                log.warning("rebuilding the state from the topics", why=why)
                self._reset()
        finally:
            await publisher.close()
        log.info("dispatcher ended", finished=self.state.finished, mode=self.state.mode, cursor=self.state.cursor)

    async def _rebuild_and_serve(self, publisher: TransactionalPublisher, stop: asyncio.Event) -> bool:
        """Rebuild the state and serve; true if another rebuild is needed: samples were lost, or the trainer changed."""
        positions = await rebuild(
            self.bus,
            self.run_name,
            self.state,
            self.clocks.monotonic,
            has_graders=self.roles.has_graders,
            on_poll=lambda: self.on_tick("dispatch"),
        )
        read = (HEARTBEATS, CONTROL, TRAJECTORIES, *([UNGRADED] if self.roles.has_graders else []))
        scope = self.state.policies.trainer_scope(self.run_name)
        topics = [topic.full_name(self.run_name) for topic in read] + [
            topic.full_name(scope) for topic in (STEPS, SKIPS)
        ]
        subscription = await self.bus.subscribe(topics, client_id=CLIENT_ID, start=positions)
        try:
            await self._serve(subscription, publisher, stop)
        finally:
            await subscription.close()
        return self.state.has_lost_samples or self.state.has_other_trainer

    async def _serve(self, subscription: Subscription, publisher: TransactionalPublisher, stop: asyncio.Event) -> None:
        listening = HeartbeatReader(
            subscription, self.loop.heartbeat_timeout_s, self.state.extend, self.clocks.monotonic
        )
        logged_at = self.clocks.monotonic()
        has_more = True
        while not stop.is_set() and not self.state.is_over(self.clocks.monotonic()):
            self.on_tick("dispatch")
            before = listening.polled_at
            # No waiting while there is more to send.
            records = await listening.poll(0.0 if has_more else self.poll_s)
            polled_at = listening.polled_at
            if self.state.mode != "run":  # time in which nothing is ordered must not make orders late
                self.state.flights.extend(max(0.0, polled_at - before - listening.given_back))
            for record in records:
                if (message := message_of(record)) is not None:
                    self.state.observe(message, polled_at)
            # Return before ordering more: the state counts samples that are lost, or that are for another trainer.
            if self.state.has_lost_samples or self.state.has_other_trainer:
                return
            has_more = False
            if self.state.mode == "run" and not self.state.finished:
                # One transaction: either all orders of a turn are sent, or none.
                reorders = self._reorders()
                new, has_more = await self._new_orders(stop)
                await self._commit(publisher, reorders + new + self._releases(), stop)
            if polled_at - logged_at >= LOG_INTERVAL_S:
                logged_at = polled_at
                log.info("dispatch progress", **self.status().fields())

    def _reorders(self) -> list[Outgoing]:
        """Orders to other workers for the missing samples of lost groups, or aborted samples for groups given up.

        These go before new prompts.
        """
        orders: list[Outgoing] = []
        checked_at = self.clocks.monotonic()
        if checked_at - self._checked_at < self.poll_s:  # each check reads all groups in flight
            return orders
        self._checked_at = checked_at
        for flight in self.state.take_from_lost_workers(self._checked_at):
            now = self.clocks.monotonic()
            group_id = flight.order.group_id
            # After so many lost workers the prompt itself is the likely cause.
            if flight.lost + 1 >= self.max_attempts and not flight.is_released:
                log.error("group given up", group=group_id, attempts=flight.lost + 1)
                topic, partition = TRAJECTORIES.full_name(self.run_name), flight.order.partition
                aborted = self.state.give_up(flight, now, self.clocks.time_of_day())
                orders += [Outgoing.of(topic, sample, key=group_id, partition=partition) for sample in aborted]
                continue
            missing = len(flight.missing)
            may_move = partial(self.state.ledger.may_move, group_id)
            worker = self.repacker.target(flight, now) if flight.is_released else None
            policy = self.state.policies.continuing(flight.order, self.state.fleet.policies(now))
            worker = worker or self.state.choose(missing, may_move, now, flight.order.worker_id, policy)
            if worker is not None:
                order = build_reorder(flight, worker, self.state.partials_of(flight))
                log_it = log.info if flight.is_released else log.warning
                log_it("group ordered again", group=group_id, missing=missing, worker=worker.worker_id)
                self.state.reassign(order, worker, now)
                orders.append(self._record(order))
        return orders

    def _releases(self) -> list[Outgoing]:
        """Requests to workers to release orders for other workers, and to delete released groups that are settled."""
        now = self.clocks.time_of_day()
        releases = self.repacker.releases(self.clocks.monotonic(), now) if self.settings.repack else []
        # These must not precede the orders that settle the groups, which are in this transaction or an earlier one.
        for (worker, incarnation), groups in self.state.settled.items():
            releases.append(
                ReleaseOrder(worker_id=worker, incarnation=incarnation, groups={}, settled=groups, sent_at=now)
            )
        self.state.settled.clear()
        return [self._outgoing(release, key=None) for release in releases]

    async def _new_orders(self, stop: asyncio.Event) -> tuple[list[Outgoing], bool]:
        """Orders for new prompts, at most those of one turn; and whether there may be room for more."""
        scheduler, orders, size = self.scheduler, list[Outgoing](), 0
        scheduler.begin_turn(self.clocks.monotonic())
        if wanted := scheduler.wanted():
            scheduler.add(await self._draw(wanted))
        if scheduler.wants_plan():
            await self._plan()
        while len(orders) < self.orders_per_turn and size <= TURN_BYTES:
            if stop.is_set() or (found := scheduler.next()) is None:
                return orders, bool(scheduler.wanted()) or await self._draw_ahead()
            pending, worker = found
            now = self.clocks.monotonic()
            # Read both before admit() advances them: the order must carry what the ledger records for it.
            created_at, due_step = self.state.created_at(self.clocks.time_of_day()), self.state.ledger.next_due
            order = build_order(
                self.loop,
                pending,
                worker,
                created_at=created_at,
                due_step=due_step,
                seed=self.roles.seed,
                decided=tuple(self.state.decided.items()) or None,
            )
            self.state.admit(order, worker, now)
            # The next choice must see the worker's new load.
            scheduler.sent(worker)
            orders.append(self._record(order))
            size += len(orders[-1].value or b"")
        return orders, True

    async def _draw(self, wanted: int) -> list[PendingPrompt]:
        """The next prompts to order, without those that an earlier dispatcher has ordered.

        If some are passed over, more positions are drawn instead, at most a window in all: after a crash, prompts that
        were not sent are looked for that far below the cursor. Positions that it finds there are not mixed with others.
        """
        state, found, left = self.state, list[PendingPrompt](), self.state.positions.window
        while wanted > 0 and left > 0:
            is_new = not state.positions.unsent
            positions = state.positions.next(min(left, wanted))
            left -= len(positions) if is_new else left
            for pending in await self._prefetcher.draw(positions):
                if not state.was_ordered(pending.group_id):
                    is_ordered, chance = state.decide(pending.position, pending.prompt)
                    if not is_ordered:
                        continue
                    found.append(replace(pending, chance=chance))
                wanted -= 1
        return found

    async def _plan(self) -> None:
        """Make a plan and adopt it. Until then heartbeats and commits wait; other tasks of the process continue."""
        started, make = self.clocks.monotonic(), self.scheduler.planner()
        items, workers = self.scheduler.unsent, self.state.fleet.ready(started)
        planned = await in_thread(make) if items * len(workers) > LARGE_PLAN else make()
        self.scheduler.adopt(planned)
        log.debug("orders planned", items=items, finish_s=planned.finish_s, took_s=self.clocks.monotonic() - started)

    async def _draw_ahead(self) -> bool:
        """If drawing is slow and most of this window is sent, draw a slice of the next one; true if there is more."""
        window = self.loop.groups_per_step
        # Not before three quarters of this window are sent, so that the estimates of the next one are fresh.
        if 4 * self.scheduler.unsent > window or not self._prefetcher.is_slow(window):
            return False
        return await self._prefetcher.prepare(self.state.positions.upcoming(window))

    def _record(self, order: WorkOrder) -> Outgoing:
        return self._outgoing(order, key=order.group_id)

    def _outgoing(self, order: WorkOrder | ReleaseOrder, key: str | None) -> Outgoing:
        topic, partition = WORK_ORDERS.full_name(self.run_name), partition_of_worker(order.worker_id)
        return Outgoing.of(topic, order, key=key, partition=partition)

    async def _commit(self, publisher: TransactionalPublisher, orders: list[Outgoing], stop: asyncio.Event) -> None:
        """Send the orders until the broker has them. Readers drop a repeat: it has the same ids."""
        # A stop abandons them: the next dispatcher reads from the topic which were sent, and sends the others first.
        while orders and not stop.is_set():
            self.on_tick("dispatch")
            try:
                await publisher.commit(orders)
            except (DeliveryUnknown, BusUnavailable) as error:
                log.warning("orders sent again", count=len(orders), error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return


@dataclass
class PromptPrefetcher:
    """Draws prompts and estimates their lengths. If that is slow, it draws ahead, so that no slot waits.

    ``on_tick`` is called once per slice.
    """

    source: PromptSource
    predictor: LengthPredictor
    clock: Callable[[], float]
    on_tick: Callable[[], None]
    _ahead: dict[int, PendingPrompt] = field(default_factory=dict)
    _prompt_s: float = 0.0

    async def draw(self, positions: Sequence[int]) -> list[PendingPrompt]:
        """The prompts at these positions, with current estimates. Prompts drawn ahead may keep an older estimate."""
        await self._read([position for position in positions if position not in self._ahead])
        drawn = [self._ahead.pop(position) for position in positions]
        started = self.clock()
        # Estimates made when prompts were drawn ahead are renewed, as many as the time limit allows.
        for number, pending in enumerate(drawn):
            if self.clock() - started > SLOW_S:
                break
            drawn[number] = replace(pending, estimate=self.predictor.predict(pending.prompt, pending.group_id))
        return drawn

    def is_slow(self, count: int) -> bool:
        """Whether drawing ``count`` prompts takes so long that they should be drawn ahead."""
        return self._prompt_s * count > SLOW_S

    async def prepare(self, positions: Sequence[int]) -> bool:
        """Draw a slice of these positions ahead; true if there are more."""
        missing = [position for position in positions if position not in self._ahead]
        await self._read(missing[:SLICE])
        return len(missing) > SLICE

    async def _read(self, positions: Sequence[int]) -> None:
        for start in range(0, len(positions), SLICE):
            part, started = positions[start : start + SLICE], self.clock()
            # In a thread, so that heartbeats are read while the source makes a slow entry.
            found = await in_thread(self._prompts, part)
            for position, (prompt, data_pass) in zip(part, found, strict=True):
                group_id = make_group_id(prompt.prompt_id, data_pass)
                estimate = self.predictor.predict(prompt, group_id)
                self._ahead[position] = PendingPrompt(position, prompt, group_id, estimate)
            self._prompt_s = max(0.0, self.clock() - started) / len(part)
            self.on_tick()

    def _prompts(self, positions: Sequence[int]) -> list[tuple[Prompt, int]]:
        return [self.source.prompt_at(position) for position in positions]


def build_order(
    loop: LoopSettings,
    pending: PendingPrompt,
    worker: Candidate,
    *,
    created_at: float,
    due_step: int,
    seed: int | None,
    decided: tuple[tuple[int, float], ...] | None = None,
) -> WorkOrder:
    """The first order for a prompt, for all of its samples. ``seed``: None leaves random numbers to the engines."""
    return WorkOrder(
        group_id=pending.group_id,
        worker_id=worker.worker_id,
        position=pending.position,
        prompt=pending.prompt,
        estimate=pending.estimate,
        sampling=loop.sampling_params(seed),
        num_generations=loop.num_generations,
        sample_indices=tuple(range(loop.num_generations)),
        partition=loop.partition_of(pending.estimate.bucket, pending.position),
        due_step=due_step,
        incarnation=worker.incarnation,
        policy=worker.policy,
        admitted_version=worker.version,
        chance=pending.chance,
        decided=decided,
        created_at=created_at,
    )


def build_reorder(flight: Flight, worker: Candidate, partials: tuple[PartialSource, ...] = ()) -> WorkOrder:
    """An order to another worker for a group's missing samples. Partition and age stay, so consumers see one group.

    ``partials``: where the worker may find tokens that were sampled before.
    """
    return flight.order.replace(
        worker_id=worker.worker_id,
        sample_indices=tuple(sorted(flight.missing)),
        attempt=flight.order.attempt + 1,
        incarnation=worker.incarnation,
        partials=partials,
        moves=flight.order.moves + flight.is_released,
        policy=worker.policy,
        admitted_version=worker.version,
        decided=None,
    )
