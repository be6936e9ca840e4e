"""A worker's side work for evaluation: samples held-out prompts in a few of the engine's slots.

Invariants:
- evaluation_never_waits_for_training: it has its own tasks, counts and slots. Heartbeats do not count it, so the
  dispatcher sends as many orders as without it, and it takes at most ``SLOTS_SHARE`` of the slots;
- only_the_served_policy_is_evaluated: a worker that has, or will have, weights of an arm of a split samples nothing;
- declined_orders_are_reported: heartbeats name the orders that the worker declines for that reason, and the evaluator
  gives them to other workers;
- unfinished_samples_are_dropped: when a worker leaves, its unfinished samples are dropped and ordered elsewhere.
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
DECLINED_S = 10.0
"""Seconds for which heartbeats name a declined order: about ten heartbeats, though one is enough."""


@dataclass(frozen=True)
class EvaluationSlots:
    """The side work of evaluation. ``slots``: most slots of the engine that it takes; none is reserved for it."""

    slots: int
    reserved_slots: int = field(init=False, default=0)

    def build(self, host: HostWorker) -> "EvaluationExecutor":
        """See ``SideWorkFactory``."""
        return EvaluationExecutor(host, self.slots)


@dataclass
class EvaluationExecutor:
    """Executes one incarnation of a worker's evaluation orders, while the worker has the served policy's weights.

    ``rollout``: its own, with its own places and counts, since heartbeats report those of training.
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
        assert self._orders is not None, "the worker subscribes before its first heartbeat"
        return [self.evaluation_loop(self._orders)]

    async def until_idle(self) -> None:
        """Return when no sample is running."""
        await self._idle.wait()

    async def close(self) -> None:
        """End the subscription."""
        if self._orders is not None:
            await self._orders.close()

    async def evaluation_loop(self, orders: Subscription) -> None:
        """Sample the ordered prompts until cancelled.

        Consumes: evaluation orders. Produces: samples, as trajectories on a topic of their own.
        Waits for: orders; its few slots; room in the outbox.
        On failure: an order that cannot be decoded is logged and skipped; a failing engine or bus raises.
        On stop: is cancelled, with all of its samples.
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
            log.error("an evaluation order cannot be decoded", offset=record.offset, error=str(error))
            return
        if not isinstance(order, EvaluationOrder):
            return
        if (order.worker_id, order.incarnation) != (self.host.worker_id, self.host.incarnation):
            return
        if self.host.status.has_arm_weights:
            self.host.status.decline(order.group_id, order.attempt, self.rollout.load.monotonic() + DECLINED_S)
            return
        for index in order.sample_indices:
            name = make_trajectory_id(order.group_id, index)
            # A restarted evaluator may order a sample again that is already running here.
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
        except WireError as error:  # it is larger than a record may be; an empty one, which counts as failed, is sent
            log.error("evaluated sample cannot be sent", trajectory=name, error=str(error))
            record = Outgoing.of(topic, self.rollout.refused(work, index, str(error)), key=order.group_id)
        await self.host.outbox.deliver(record)
