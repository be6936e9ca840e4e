"""The dispatcher's driver: reads the topics, sends orders. What to send is decided in the state it holds.

Invariants:
- no_prompt_is_left_out: the orders of one turn are committed in one transaction, by position, and each turn before the
  next; so the topic never holds a later position without the earlier ones;
- one_dispatcher_orders: all transactions are of one id, whose newest holder fences all older ones. A dispatcher that
  stood still while another took over orders nothing more.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from producers.dispatch.flights import Flight
from producers.dispatch.recovery import CLIENT_ID, message_of, rebuild
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.state import DispatcherStatus, DispatchState
from producers.dispatch.strategies import Candidate
from producers.lengths.predictor import LengthPredictor
from producers.prompts.source import PromptSource
from schemas.errors import BusUnavailable, DeliveryUnknown
from schemas.identifiers import lane_of, make_group_id
from schemas.messages.prompts import SamplingParams, WorkOrder
from schemas.ports.bus import Bus, Outgoing, Subscription, TransactionalPublisher
from schemas.settings import LoopSettings
from schemas.wire.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS

log = structlog.get_logger()

TURN_BYTES = 8 << 20
RETRY_S = 0.5


@dataclass
class Dispatcher:
    """One per run; a second one supersedes the first. A restart rebuilds everything from the topics.

    ``seed``: what the random numbers of all samples are drawn from; none leaves that to the engines. ``alive`` is
    told, by name, of every turn of a loop.
    """

    bus: Bus
    run_name: str
    loop: LoopSettings
    settings: DispatchSettings
    source: PromptSource
    predictor: LengthPredictor
    clock: Callable[[], float] = time.time
    seed: int | None = None
    alive: Callable[[str], None] = lambda name: None
    state: DispatchState = field(init=False)
    _heard_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.state = DispatchState(self.loop, self.settings, self.predictor)

    def status(self) -> DispatcherStatus:
        """A snapshot of what is under way."""
        return self.state.status(self.clock())

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
                self.state = DispatchState(self.loop, self.settings, self.predictor)
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
            self.alive("dispatch")
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
        orders = []
        for flight in self.state.lost(self.clock()):
            now = self.clock()
            group_id = flight.order.group_id
            if flight.order.attempt + 1 >= self.settings.max_attempts:
                log.error("group given up", group=group_id, attempts=flight.order.attempt + 1)
                self.state.give_up(flight)
                continue
            missing = len(flight.missing)
            may_move = partial(self.state.ledger.may_move, group_id)
            worker = self.state.choose(missing, may_move, now, other_than=flight.order.worker_id)
            if worker is not None:
                order = self._follow_up(flight, worker)
                log.warning("group ordered again", group=group_id, missing=missing, worker=worker.worker_id)
                self.state.reassign(order, worker, now)
                orders.append(order)
        return orders

    async def _add_new_orders(self, orders: list[WorkOrder], stop: asyncio.Event) -> bool:
        """Orders for new prompts, one turn's at most; true if there may be room for more."""
        size = 0
        for _ in range(self.settings.orders_per_turn):
            now = self.clock()
            worker = self.state.choose(self.loop.num_generations, self.state.ledger.may_admit, now)
            if worker is None or stop.is_set():
                return False
            order = await self._next_order(worker, now)
            self.state.admit(order, worker, now)
            orders.append(order)
            size += len(order.prompt.text)
            if size > TURN_BYTES:
                break
        return True

    async def _next_order(self, worker: Candidate, now: float) -> WorkOrder:
        position = self.state.cursor
        prompt, data_pass = await asyncio.to_thread(self.source.prompt_at, position)
        estimate = self.predictor.predict(prompt)
        return WorkOrder(
            group_id=make_group_id(prompt.prompt_id, data_pass),
            worker_id=worker.worker_id,
            position=position,
            prompt=prompt,
            estimate=estimate,
            sampling=SamplingParams(
                max_completion_length=self.loop.max_completion_length,
                temperature=self.loop.temperature,
                top_p=self.loop.top_p,
                top_k=self.loop.top_k,
                seed=self.seed,
            ),
            num_generations=self.loop.num_generations,
            sample_indices=tuple(range(self.loop.num_generations)),
            partition=self.loop.partition_of(estimate.bucket, position),
            admitted_version=worker.version,
            created_at=self.state.created_at(now),
        )

    @staticmethod
    def _follow_up(flight: Flight, worker: Candidate) -> WorkOrder:
        """The same group, partition and age, so that consumers see one group; only what is missing of it."""
        return flight.order.replace(
            worker_id=worker.worker_id,
            sample_indices=tuple(sorted(flight.missing)),
            attempt=flight.order.attempt + 1,
            admitted_version=worker.version,
        )

    async def _commit(self, publisher: TransactionalPublisher, orders: list[WorkOrder], stop: asyncio.Event) -> None:
        """Send until the broker has them; a repeat under the same ids is dropped by whoever reads it twice."""
        topic = WORK_ORDERS.full_name(self.run_name)
        records = [
            Outgoing.of(topic, order, key=order.group_id, partition=lane_of(order.worker_id)) for order in orders
        ]
        while records and not stop.is_set():
            self.alive("dispatch")
            try:
                await publisher.commit(records)
            except (DeliveryUnknown, BusUnavailable) as error:
                log.warning("orders sent again", count=len(records), error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _log_progress(self) -> None:
        status = self.status()
        log.info(
            "dispatch progress",
            version=str(status.version),
            mode=status.mode,
            cursor=status.cursor,
            in_flight=status.in_flight,
            missing=status.missing,
            workers=status.workers_ready,
            reordered=status.reordered,
            **status.lengths.fields(),
        )
