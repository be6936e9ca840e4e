"""The dispatcher's driver: reads the topics, sends orders. What to send is decided in the state it holds.

Invariants:
- no_prompt_is_left_out: prompts are drawn by position, a window is sent whole before the next is drawn, and the orders
  of a turn are committed in one transaction before the next turn. So what a dispatcher that ends leaves unsent lies
  within a window's length below the cursor, and the next one finds it there and sends it first;
- one_dispatcher_orders: all transactions are of one id, whose newest holder fences all older ones. A dispatcher that
  stood still while another took over orders nothing more.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from bus.port import Bus, Outgoing, Subscription, TransactionalPublisher, message_of
from producers.dispatch.recovery import CLIENT_ID, rebuild
from producers.dispatch.scheduler import Scheduler
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.state import DispatchState
from producers.dispatch.status import DispatcherStatus, status_of
from producers.dispatch.window import Drafts, OrderForm
from producers.lengths.predictor import LengthPredictor
from producers.prompts.sources import PromptSource
from schemas.errors import BusUnavailable, DeliveryUnknown
from schemas.identifiers import partition_of_worker
from schemas.profiles import TYPICAL_CURVE, DecodeCurve
from schemas.settings import LoopSettings
from schemas.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from schemas.trajectories import WorkOrder

log = structlog.get_logger()

TURN_BYTES = 8 << 20
RETRY_S = 0.5
LARGE_PLAN = 512
"""Items times workers from which on a plan is made in a thread."""


@dataclass
class Dispatcher:
    """One per run; a second one supersedes the first. A restart rebuilds everything from the topics.

    ``seed``: what the random numbers of all samples are drawn from; none leaves that to the engines. ``on_tick`` is
    told, by name, of every turn of a loop. ``curve``: a worker's decode steps, in seconds of the clock; its scale is
    corrected by what arrives.
    """

    bus: Bus
    run_name: str
    loop: LoopSettings
    settings: DispatchSettings
    source: PromptSource
    predictor: LengthPredictor
    clock: Callable[[], float] = time.time
    seed: int | None = None
    on_tick: Callable[[str], None] = lambda name: None
    curve: DecodeCurve = TYPICAL_CURVE
    state: DispatchState = field(init=False)
    scheduler: Scheduler = field(init=False)
    _drafts: Drafts = field(init=False)
    _heard_at: float = field(init=False)
    _looked_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._form = OrderForm(self.loop, self.seed)
        self._begin()

    def _begin(self) -> None:
        """With empty hands."""
        self.state = DispatchState(self.loop, self.settings, self.predictor, self.curve)
        self.scheduler = Scheduler(self.state, self.settings)
        self._drafts = Drafts(self.source, self.predictor, self.clock, lambda: self.on_tick("dispatch"))

    def status(self) -> DispatcherStatus:
        """A snapshot of what is under way."""
        return status_of(self.state, self.scheduler, self.clock())

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the workers supplied with prompts as far as staleness allows.

        Consumes: heartbeats, trajectories, steps, skips and control; at the start also its own work orders.
        Produces: work orders.
        Waits for: room under the staleness bound and a worker with free slots.
        On failure: raises; a restart rebuilds the state and goes on at the same prompt. ``Superseded``: another
            dispatcher took over.
        On stop: ends within one poll and one transaction, as it does when the run has finished or is drained.
        """
        publisher = await self.bus.transactional(f"{self.run_name}.{CLIENT_ID}")
        try:
            while await self._live(publisher, stop):
                log.warning("samples expired before they were trained; they are looked for, and ordered again")
                self._begin()
        finally:
            await publisher.close()
        log.info("dispatcher ended", finished=self.state.finished, mode=self.state.mode, cursor=self.state.cursor)

    async def _live(self, publisher: TransactionalPublisher, stop: asyncio.Event) -> bool:
        """Rebuild the state and serve; true if records were lost, so that the state is to be rebuilt."""
        topics = [topic.full_name(self.run_name) for topic in (HEARTBEATS, CONTROL, STEPS, SKIPS, TRAJECTORIES)]
        positions = await rebuild(self.bus, self.run_name, self.state, self.clock)
        subscription = await self.bus.subscribe(topics, client_id=CLIENT_ID, start=positions)
        try:
            await self._serve(subscription, publisher, stop)
        finally:
            await subscription.close()
        return self.state.has_lost_samples

    async def _serve(self, subscription: Subscription, publisher: TransactionalPublisher, stop: asyncio.Event) -> None:
        listened = logged = self._heard_at = self.clock()
        has_more = True
        while not stop.is_set() and not self.state.is_over(self.clock()):
            self.on_tick("dispatch")
            self._forgive_our_own_silence(self.clock() - listened)
            records = await subscription.poll(timeout_s=0.0 if has_more else self.settings.poll_s)
            listened = self.clock()
            for record in records:
                if (message := message_of(record)) is not None:
                    self.state.observe(message, listened)
            if self.state.has_lost_samples:
                return
            await self._forgive_a_silent_broker(subscription, bool(records))
            has_more = False
            if self.state.mode == "run" and not self.state.finished:
                orders = self._orders_again()
                has_more = await self._add_new_orders(orders, stop)
                await self._commit(publisher, orders, stop)
            if listened - logged >= self.settings.log_interval_s:
                logged = listened
                self._log_progress()

    def _forgive_our_own_silence(self, seconds: float) -> None:
        if seconds > self.settings.lease_s / 2:
            self.state.forgive(seconds)
        elif self.state.mode != "run":
            self.state.flights.extend(seconds)

    async def _forgive_a_silent_broker(self, subscription: Subscription, heard: bool) -> None:
        """When nothing at all is heard, the broker is asked whether it is there; if not, no worker is to blame."""
        silent_s = self.clock() - self._heard_at
        if not heard and silent_s < self.settings.lease_s / 4:
            return
        if not heard:
            try:
                await subscription.end_offsets()
            except BusUnavailable as error:
                log.warning("the broker is silent, so leases stand still", error=str(error))
                self.state.forgive(silent_s)
        self._heard_at = self.clock()

    def _orders_again(self) -> list[WorkOrder]:
        """What is missing of groups whose worker was lost goes to others; it comes before new prompts."""
        orders: list[WorkOrder] = []
        if self.clock() - self._looked_at < self.settings.poll_s:  # a look goes through everything under way
            return orders
        self._looked_at = self.clock()
        for flight in self.state.lost(self._looked_at):
            now = self.clock()
            group_id = flight.order.group_id
            if flight.order.attempt + 1 >= self.settings.max_attempts:
                log.error("group given up", group=group_id, attempts=flight.order.attempt + 1)
                self.state.give_up(flight, now)
                continue
            missing = len(flight.missing)
            may_move = partial(self.state.ledger.may_move, group_id)
            worker = self.state.choose(missing, may_move, now, other_than=flight.order.worker_id)
            if worker is not None:
                order = self._form.again(flight, worker)
                log.warning("group ordered again", group=group_id, missing=missing, worker=worker.worker_id)
                self.state.reassign(order, worker, now)
                orders.append(order)
        return orders

    async def _add_new_orders(self, orders: list[WorkOrder], stop: asyncio.Event) -> bool:
        """Orders for new prompts, one turn's at most; true if there may be room for more."""
        scheduler = self.scheduler
        scheduler.begin_turn(self.clock())
        if wanted := scheduler.wanted():
            scheduler.add(await self._drafts.draw(self.state.positions.next(wanted)))
        if scheduler.wants_plan():
            await self._plan()
        size = 0
        for _ in range(self.settings.orders_per_turn):
            if stop.is_set() or (found := scheduler.next()) is None:
                return bool(scheduler.wanted()) or await self._draw_ahead()
            draft, worker = found
            now = self.clock()
            order = self._form.first(draft, worker, self.state.created_at(now), self.state.ledger.next_due)
            self.state.admit(order, worker, now)
            scheduler.sent(worker)
            orders.append(order)
            size += len(order.prompt.text)
            if size > TURN_BYTES:
                break
        return True

    async def _plan(self) -> None:
        """Heartbeats and commits wait for it, other tasks of this process do not."""
        began, make = self.clock(), self.scheduler.planner()
        items, workers = len(self.scheduler.lanes), self.state.fleet.ready(began)
        planned = await asyncio.to_thread(make) if items * len(workers) > LARGE_PLAN else make()
        self.scheduler.adopt(planned)
        log.debug("orders planned", items=items, finish_s=planned.finish_s, took_s=self.clock() - began)

    async def _draw_ahead(self) -> bool:
        """Where drawing is slow, a slice of the next window, once most of this one is sent; true if there is more."""
        window = self.loop.groups_per_step
        if 4 * len(self.scheduler.lanes) > window or not self._drafts.is_slow(window):
            return False
        return await self._drafts.prepare(self.state.positions.upcoming(window))

    async def _commit(self, publisher: TransactionalPublisher, orders: list[WorkOrder], stop: asyncio.Event) -> None:
        """Send until the broker has them; a repeat under the same ids is dropped by whoever reads it twice."""
        topic = WORK_ORDERS.full_name(self.run_name)
        records = [
            Outgoing.of(topic, order, key=order.group_id, partition=partition_of_worker(order.worker_id))
            for order in orders
        ]
        while records and not stop.is_set():
            self.on_tick("dispatch")
            try:
                await publisher.commit(records)
            except (DeliveryUnknown, BusUnavailable) as error:
                log.warning("orders sent again", count=len(records), error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _log_progress(self) -> None:
        status = self.status()
        log.info("dispatch progress", **status.fields())
