"""Writes work orders: the first one for a prompt, and one for what is missing of a group."""

from dataclasses import dataclass

from producers.dispatch.fleet.candidates import Candidate
from producers.dispatch.fleet.flights import Flight
from producers.dispatch.window.drafts import Draft
from schemas.messages.prompts import SamplingParams, WorkOrder
from schemas.settings import LoopSettings


@dataclass(frozen=True)
class OrderForm:
    """``seed``: what the random numbers of all samples are drawn from; none leaves that to the engines."""

    loop: LoopSettings
    seed: int | None

    def first(self, draft: Draft, worker: Candidate, created_at: float, due_step: int) -> WorkOrder:
        """All samples of a prompt."""
        return WorkOrder(
            group_id=draft.group_id,
            worker_id=worker.worker_id,
            position=draft.position,
            prompt=draft.prompt,
            estimate=draft.estimate,
            sampling=SamplingParams(
                max_completion_length=self.loop.max_completion_length,
                temperature=self.loop.temperature,
                top_p=self.loop.top_p,
                top_k=self.loop.top_k,
                seed=self.seed,
            ),
            num_generations=self.loop.num_generations,
            sample_indices=tuple(range(self.loop.num_generations)),
            partition=self.loop.partition_of(draft.estimate.bucket, draft.position),
            due_step=due_step,
            admitted_version=worker.version,
            created_at=created_at,
        )

    @staticmethod
    def again(flight: Flight, worker: Candidate) -> WorkOrder:
        """The same group, partition and age, so that consumers see one group; only what is missing of it."""
        return flight.order.replace(
            worker_id=worker.worker_id,
            sample_indices=tuple(sorted(flight.missing)),
            attempt=flight.order.attempt + 1,
            admitted_version=worker.version,
        )
