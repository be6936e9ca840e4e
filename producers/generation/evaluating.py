"""A worker's share in evaluation: samples of held-out prompts, beside its orders and in few of its slots.

Invariants:
- evaluation_waits_for_nothing_of_training: it has tasks, counts and slots of its own; heartbeats tell nothing of it,
  so the dispatcher sends as if it were not there, and at most ``evaluation.share`` of the slots are taken;
- evaluation_is_of_the_served_policy: a worker whose weights are, or will be, an arm's of a split samples nothing;
- what_is_declined_is_said: heartbeats name the orders that it therefore does not take, and they are ordered elsewhere;
- nothing_of_it_is_kept: what is unfinished when a worker leaves is dropped, and ordered elsewhere.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import structlog

from streamrl.bus.port import Bus, Outgoing, Record, Subscription
from streamrl.producers.generation.engines.port import encoded
from streamrl.producers.generation.outbox import Outbox
from streamrl.producers.generation.rollout import Rollout, WorkerLoad
from streamrl.schemas.errors import PromptRefused, WireError
from streamrl.schemas.evaluation import EvaluationOrder
from streamrl.schemas.identifiers import make_trajectory_id
from streamrl.schemas.topics import EVALUATION_ORDERS, EVALUATION_SAMPLES

log = structlog.get_logger()

POLL_S = 0.5
TOLD_S = 10.0
"""So long heartbeats name an order that was declined: about ten of them, of which one is enough."""


async def subscribe_evaluation(bus: Bus, run_name: str, client_id: str) -> Subscription:
    """Evaluation orders from now on.

    Raises:
        BusUnavailable: no broker answers.
    """
    return await bus.subscribe([EVALUATION_ORDERS.full_name(run_name)], client_id=client_id, start="latest")


@dataclass
class EvaluationExecutor:
    """Carries out the evaluation orders of one incarnation of a worker; ``rollout`` is its own, with its own places.

    ``is_open``: whether orders are taken, as long as its weights are the served policy's; ``on_declined`` is called
    when one is not.
    """

    orders: Subscription
    rollout: Rollout
    outbox: Outbox
    topic: str
    incarnation: str
    max_prompt_length: int = 1 << 30
    on_tick: Callable[[str], None] = lambda name: None
    is_open: Callable[[], bool] = lambda: True
    on_declined: Callable[[], None] = lambda: None
    running: set[str] = field(default_factory=set)
    _declined: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By group: which attempt, and when."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    async def until_idle(self) -> None:
        """Return when no sample is under way."""
        await self._idle.wait()

    def declined(self) -> dict[str, int]:
        """What heartbeats say of orders that were declined: by group, the attempt."""
        since = self.rollout.load.monotonic() - TOLD_S
        self._declined = {name: (attempt, at) for name, (attempt, at) in self._declined.items() if at > since}
        return {name: attempt for name, (attempt, _) in self._declined.items()}

    @classmethod
    def beside(
        cls, rollout: Rollout, slots: int, orders: Subscription, outbox: Outbox, run_name: str, incarnation: str
    ) -> Self:
        """Beside a worker's rollout: with counts of its own, since those of the heartbeats are of training."""
        load = WorkerLoad(rollout.load.monotonic)
        own = Rollout(rollout.engine, rollout.tokenizer, rollout.scorer, rollout.worker_id, load, clock=rollout.clock)
        own.places = asyncio.Semaphore(slots)
        return cls(orders, own, outbox, EVALUATION_SAMPLES.full_name(run_name), incarnation)

    async def evaluation_loop(self) -> None:
        """Sample what is ordered.

        Consumes: evaluation orders. Produces: samples, as trajectories of a topic of their own.
        Waits for: orders; its few slots; room in the outbox.
        On failure: an order that does not decode is logged and passed over; a failing engine or bus raises.
        On stop: is cancelled, with all that it samples.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                self.on_tick("evaluation")
                for record in await self.orders.poll(timeout_s=POLL_S):
                    self._accept(record, tasks)

    def _accept(self, record: Record, tasks: asyncio.TaskGroup) -> None:
        try:
            order = record.message()
        except WireError as error:
            log.error("evaluation order not understood", offset=record.offset, error=str(error))
            return
        if not isinstance(order, EvaluationOrder):
            return
        if (order.worker_id, order.incarnation) != (self.rollout.worker_id, self.incarnation):
            return
        if not self.is_open():
            self._declined[order.group_id] = order.attempt, self.rollout.load.monotonic()
            self.on_declined()
            return
        for index in order.sample_indices:
            name = make_trajectory_id(order.group_id, index)
            # From an evaluator that was started anew: the sample is the same, and is under way.
            if name not in self.running:
                self.running.add(name)
                self._idle.clear()
                tasks.create_task(self._sample(order, index, name), name=name)

    async def _sample(self, order: EvaluationOrder, index: int, name: str) -> None:
        work = order.work_order()
        try:
            prompt = encoded(self.rollout.tokenizer, order.prompt, self.max_prompt_length)
            trajectory = await self.rollout.sample(work, index, prompt)
        except PromptRefused as refusal:
            trajectory = self.rollout.refused(work, index, str(refusal), refusal.cause)
        finally:
            self.running.discard(name)
            if not self.running:
                self._idle.set()
        try:
            record = Outgoing.of(self.topic, trajectory, key=order.group_id)
        except WireError as error:  # larger than a record may be; an empty one in its place has failed
            log.error("evaluated sample cannot be sent", trajectory=name, error=str(error))
            record = Outgoing.of(self.topic, self.rollout.refused(work, index, str(error)), key=order.group_id)
        await self.outbox.deliver(record)
