"""Carries out work orders: each sample becomes a task that ends when the broker has its trajectory."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from producers.generation.outbox import Outbox
from producers.generation.rollout.rollout import Rollout
from schemas.errors import WireError
from schemas.identifiers import make_trajectory_id
from schemas.messages.prompts import WorkOrder
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Outgoing, Record

log = structlog.get_logger()


@dataclass
class Orders:
    """``in_hand`` holds the tasks of unfinished samples by trajectory id."""

    rollout: Rollout
    outbox: Outbox
    topic: str
    max_prompt_length: int
    in_hand: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)

    def accept(self, record: Record, tasks: asyncio.TaskGroup) -> None:
        """Start every sample of an order that is for this worker and not in hand yet."""
        try:
            order = record.message()
        except WireError as error:
            log.error("work order not understood", partition=record.partition, offset=record.offset, error=str(error))
            return
        if not isinstance(order, WorkOrder) or order.worker_id != self.rollout.worker_id:
            return
        prompt = self._prompt_token_ids(order)
        for index in order.sample_indices:
            trajectory_id = make_trajectory_id(order.group_id, index)
            if trajectory_id not in self.in_hand:
                task = tasks.create_task(self._produce(order, index, prompt), name=trajectory_id)
                self.in_hand[trajectory_id] = task
                task.add_done_callback(self._forget)

    async def abandon(self) -> None:
        """Drop what is in hand; nothing of it is published, so that it can be ordered elsewhere."""
        left = [*self.in_hand.values()]
        for task in left:
            task.cancel()
        if left:
            log.info("unfinished completions abandoned", count=len(left))
            await asyncio.wait(left)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        del self.in_hand[task.get_name()]

    def _prompt_token_ids(self, order: WorkOrder) -> Sequence[int] | str:
        """Token ids of the prompt, or why there are none."""
        try:
            token_ids = self.rollout.tokenizer.encode_prompt(order.prompt)
        except Exception as error:  # chat templates raise what they like
            reason = f"expected a prompt that can be tokenised, got {type(error).__name__}: {error}"[:300]
        else:
            if 0 < len(token_ids) <= self.max_prompt_length:
                return token_ids
            reason = f"expected a prompt of 1 to {self.max_prompt_length} tokens, got {len(token_ids)}"
        log.error("prompt refused", prompt=order.prompt.prompt_id, reason=reason)
        return reason

    async def _produce(self, order: WorkOrder, index: int, prompt: Sequence[int] | str) -> None:
        structlog.contextvars.bind_contextvars(trajectory=make_trajectory_id(order.group_id, index))
        if isinstance(prompt, str):
            trajectory = self.rollout.refused(order, index, prompt)
        else:
            trajectory = await self.rollout.sample(order, index, prompt)
        await self.outbox.deliver(self._record(order, trajectory))
        self.rollout.load.finished_trajectories += 1

    def _record(self, order: WorkOrder, trajectory: Trajectory) -> Outgoing:
        try:
            return Outgoing.of(self.topic, trajectory, key=order.group_id, partition=order.partition)
        except WireError as error:
            log.error("trajectory cannot be sent", trajectory=trajectory.trajectory_id, error=str(error))
            refused = self.rollout.refused(order, trajectory.sample_index, str(error))
            return Outgoing.of(self.topic, refused, key=order.group_id, partition=order.partition)
