"""Seconds of micro-batches, optimizer steps and exports on the real policy, with made-up samples.

Knows no topics; the policy computes where a trainer's would, in one thread.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from consumers.batching.samples import MicroBatch
from consumers.training.ports import Compute, Policy
from schemas.errors import StreamRLError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RecordRef

LARGEST_ID = 1 << 15


@dataclass(frozen=True, slots=True)
class StepPoint:
    """An optimizer step over ``micro_batches`` micro-batches: their tokens and squared lengths, in seconds."""

    micro_batches: int
    tokens: int
    squares: int
    seconds: float


@dataclass(frozen=True)
class TrainMeter:
    """``repeats``: steps per point, of which the fastest counts: other processes only ever add to one."""

    policy: Policy
    compute: Compute
    repeats: int

    async def steps_at(self, lengths: Sequence[int], budget: int) -> "Sequence[StepPoint]":
        """Points for sequences of these lengths: one row, half a budget and a whole one, in one or three passes."""
        points = []
        await self._step(synthetic(1, min(lengths), self.policy.limits.vocabulary), 1)
        for rows, length in _shapes(lengths, budget):
            batch = synthetic(rows, length, self.policy.limits.vocabulary)
            for passes in (1, 3):
                seconds = min([await self._step(batch, passes) for _ in range(self.repeats)])
                tokens = passes * rows * length
                points.append(StepPoint(passes, tokens, tokens * length, seconds))
        return points

    async def export(self, version: PolicyVersion) -> tuple[str, float]:
        """Put weights into the store: the sha256 of their manifest, and the seconds it took."""
        await self._step(synthetic(1, 8, self.policy.limits.vocabulary), 1)
        began = time.perf_counter()
        sha256 = await self.compute(self.policy.export, version, time.time())
        return sha256, time.perf_counter() - began

    async def _step(self, batch: MicroBatch, passes: int) -> float:
        began = time.perf_counter()
        for _ in range(passes):
            await self.compute(self.policy.accumulate, batch)
        outcome = await self.compute(self.policy.finish_step, 1.0)
        if not outcome.applied:
            raise StreamRLError(f"expected an optimizer step on made-up samples, got: {outcome.problem}")
        return time.perf_counter() - began


def _shapes(lengths: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    for length in lengths:
        yield from ((rows, length) for rows in sorted({1, max(1, budget // length // 2), max(1, budget // length)}))


def synthetic(rows: int, length: int, vocabulary: int) -> MicroBatch:
    """A micro-batch without padding: random tokens, half of them completion, advantages of both signs."""
    chance = np.random.default_rng(length * 4099 + rows)
    mask = np.zeros((rows, length), dtype=np.float32)
    mask[:, max(1, length // 2) :] = 1.0
    return MicroBatch(
        input_ids=chance.integers(0, min(vocabulary, LARGEST_ID), (rows, length), dtype=np.int64),
        attention_mask=np.ones((rows, length), dtype=np.int64),
        loss_mask=mask,
        behaviour_logprobs=np.full((rows, length), -5.0, dtype=np.float32),
        advantages=np.where(np.arange(rows) % 2, 1.0, -1.0).astype(np.float32),
        lengths=np.full(rows, length, dtype=np.int64),
        temperatures=np.ones(rows, dtype=np.float32),
        refs=tuple(RecordRef(f"profile/{row}", 0, row) for row in range(rows)),
    )
