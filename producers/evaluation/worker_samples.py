"""A worker's share in evaluation, as side work: samples of held-out prompts, in few of the engine's slots.

Invariants:
- evaluation_waits_for_nothing_of_training: it has tasks, counts and slots of its own; heartbeats count nothing of it,
  so the dispatcher sends as if it were not there, and at most ``evaluation.share`` of the slots are taken;
- evaluation_is_of_the_served_policy: a worker whose weights are, or will be, an arm's of a split samples nothing;
- what_is_declined_is_said: heartbeats name the orders that it therefore does not take, and they are ordered elsewhere;
- nothing_of_it_is_kept: what is unfinished when a worker leaves is dropped, and ordered elsewhere.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from streamrl.bus.port import Outgoing, Record, Subscription
from streamrl.producers.generation.engines.port import encoded
from streamrl.producers.generation.rollout import Rollout, WorkerLoad
from streamrl.producers.generation.side_work import HostWorker
from streamrl.schemas.errors import PromptRefused, WireError
from streamrl.schemas.evaluation import EvaluationOrder
from streamrl.schemas.identifiers import make_trajectory_id
from streamrl.schemas.topics import EVALUATION_ORDERS, EVALUATION_SAMPLES

log = structlog.get_logger()

POLL_S = 0.5
TOLD_S = 10.0
"""So long heartbeats name an order that was declined: about ten of them, of which one is enough."""


@dataclass(frozen=True)
class EvaluationSlots:
    """At most so many of the engine's slots are taken by evaluation at a time; orders may have them all."""

    slots: int
    reserved_slots: int = field(init=False, default=0)

    def build(self, host: HostWorker) -> "EvaluationExecutor":
        """See ``SideWorkFactory``."""
        return EvaluationExecutor(host, self.slots)


@dataclass
class EvaluationExecutor:
    """Carries out the evaluation orders of one incarnation of a worker, as long as it has the served policy's weights.

    ``rollout`` is its own, with its own places and counts: those of the heartbeats are of training.
    """

    host: HostWorker
    slots: int
    rollout: Rollout = field(init=False)
    running: set[str] = field(init=False, default_factory=set)
    holds_up_leaving: bool = field(init=False, default=False)
    _orders: Subscription | None = field(init=False, default=None)
    _idle: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        orders = self.host.rollout
        self.rollout = Rollout(
            orders.engine,
            orders.tokenizer,
            orders.scorer,
            orders.worker_id,
            WorkerLoad(orders.load.monotonic),
            clock=orders.clock,
            places=asyncio.Semaphore(self.slots),
        )
        self._idle.set()

    async def subscribe(self) -> None:
        """Read evaluation orders from now on.

        Raises:
            BusUnavailable: no broker answers.
        """
        topic, client_id = EVALUATION_ORDERS.full_name(self.host.run_name), f"worker-{self.host.worker_id}"
        self._orders = await self.host.bus.subscribe([topic], client_id=client_id, start="latest")

    async def begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        """See ``SideWork``."""
        assert self._orders is not None, "subscribed to before the first heartbeat"
        return [self.evaluation_loop(self._orders)]

    async def until_idle(self) -> None:
        """Return when no sample is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """End the subscription."""
        if self._orders is not None:
            await self._orders.close()

    async def evaluation_loop(self, orders: Subscription) -> None:
        """Sample what is ordered.

        Consumes: evaluation orders. Produces: samples, as trajectories of a topic of their own.
        Waits for: orders; its few slots; room in the outbox.
        On failure: an order that does not decode is logged and passed over; a failing engine or bus raises.
        On stop: is cancelled, with all that it samples.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                self.host.on_tick("evaluation")
                for record in await orders.poll(timeout_s=POLL_S):
                    self._accept(record, tasks)

    def _accept(self, record: Record, tasks: asyncio.TaskGroup) -> None:
        try:
            order = record.message()
        except WireError as error:
            log.error("evaluation order not understood", offset=record.offset, error=str(error))
            return
        if not isinstance(order, EvaluationOrder):
            return
        if (order.worker_id, order.incarnation) != (self.host.worker_id, self.host.incarnation):
            return
        if self.host.status.is_of_an_arm:
            self.host.status.decline(order.group_id, order.attempt, self.rollout.load.monotonic() + TOLD_S)
            return
        for index in order.sample_indices:
            name = make_trajectory_id(order.group_id, index)
            # Ordered again by an evaluator that restarted: the sample is the same, and is under way.
            if name not in self.running:
                self.running.add(name)
                self._idle.clear()
                tasks.create_task(self._sample(order, index, name), name=name)

    async def _sample(self, order: EvaluationOrder, index: int, name: str) -> None:
        work = order.work_order()
        try:
            prompt = encoded(self.rollout.tokenizer, order.prompt, self.host.max_prompt_length)
            trajectory = await self.rollout.sample(work, index, prompt)
        except PromptRefused as refusal:
            trajectory = self.rollout.refused(work, index, str(refusal), refusal.cause)
        finally:
            self.running.discard(name)
            if not self.running:
                self._idle.set()
        topic = EVALUATION_SAMPLES.full_name(self.host.run_name)
        try:
            record = Outgoing.of(topic, trajectory, key=order.group_id)
        except WireError as error:  # larger than a record may be; an empty one in its place has failed
            log.error("evaluated sample cannot be sent", trajectory=name, error=str(error))
            record = Outgoing.of(topic, self.rollout.refused(work, index, str(error)), key=order.group_id)
        await self.host.outbox.deliver(record)
