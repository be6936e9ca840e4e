"""Takes the groups of one step and adds up their gradients. Applies nothing, announces nothing.

What the modes differ in here is when a micro-batch is cut: ``synchronous`` takes all groups of the step before its
first one; the others begin as soon as there is one worth computing, and never let the device wait for a better one.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from consumers.algorithms.advantages import credit_group, refusal_of
from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batches import Group, MicroBatch
from consumers.ingest.reader import Intake
from consumers.training.metrics import Stopwatch
from consumers.training.resume import Point
from consumers.training.session import Incarnation
from consumers.training.step_report import GatheredStep
from schemas.settings import LoopSettings

IDLE_S = 5.0
"""How long a trainer waits for a group before it asks whether another has taken over."""


@dataclass(frozen=True)
class Gatherer:
    """Of one life and its intake."""

    life: Incarnation
    intake: Intake
    loop: LoopSettings
    algorithm: AlgorithmSettings
    clock: Callable[[], float] = time.time

    async def gather(self, stop: asyncio.Event) -> GatheredStep | None:
        """A whole batch, its gradient gathered in the policy; none if stopped before that."""
        life, intake = self.life, self.intake
        gathered = GatheredStep(life.version, Stopwatch(self.clock))
        limits = life.policy.limits
        while len(gathered.groups) < self.loop.groups_per_step:
            group = await self._next_group(gathered, stop)
            if group is None:
                await self._drop()
                return None
            life.reached(Point.GROUP_TAKEN)
            credit = credit_group(group, self.algorithm, limits)
            if (refusal := refusal_of(credit, self.algorithm)) is not None:
                intake.mark_skipped(group, *refusal)
                life.reached(Point.GROUP_SKIPPED)
                continue
            gathered.add(group, credit)
            life.reached(Point.GROUP_CREDITED)
            for batch in life.batcher.add(credit.training_samples):
                await self._backward(gathered, batch)
        for batch in life.batcher.flush():
            await self._backward(gathered, batch)
        life.reached(Point.BATCH_GATHERED)
        return gathered

    async def _next_group(self, gathered: GatheredStep, stop: asyncio.Event) -> Group | None:
        """The next group, or none once stopped. While none is ready, the device gets what is held."""
        while not stop.is_set():
            await asyncio.sleep(0)
            if (group := self.intake.ready_group()) is not None:
                return group
            batch = self.life.batcher.cut_for_idle()
            if batch is None:
                with gathered.watch.measure("wait_for_batch"):
                    return await _awaited_group(self.life, self.intake, stop)
            await self._backward(gathered, batch)
        return None

    async def _backward(self, gathered: GatheredStep, batch: MicroBatch) -> None:
        with gathered.watch.measure("forward_backward"):
            await self.life.compute(self.life.policy.accumulate, batch)
        gathered.trained(batch, self.loop.shards)
        self.life.reached(Point.GRADIENT_ADDED)

    async def _drop(self) -> None:
        self.life.reached(Point.STOP_SEEN)
        self.life.batcher.clear()
        await self.life.compute(self.life.policy.discard)
        self.life.reached(Point.GRADIENT_DROPPED)


async def _awaited_group(life: Incarnation, intake: Intake, stop: asyncio.Event) -> Group | None:
    """The next group, or none once stopped. Meanwhile a failed announcement is raised, and a newer trainer noticed."""
    while not stop.is_set():
        getting, stopping = asyncio.ensure_future(intake.next_group()), asyncio.ensure_future(stop.wait())
        announcing = life.announcements.under_way
        try:
            waited_for = {getting, stopping} if announcing is None else {getting, stopping, announcing}
            finished, _ = await asyncio.wait(waited_for, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            if announcing is not None and announcing.done():
                await life.announcements.settled()
            if not finished:
                await life.check_lineage()
            if getting.done():  # it took a group while something else was waited for
                return getting.result()
        finally:
            for waiting in (getting, stopping):
                waiting.cancel()
    return None
