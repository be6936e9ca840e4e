"""Makes one trajectory: sample, decode, score. Knows an engine, a tokenizer and a scorer, but no orders' lane.

Invariant every_sample_is_accounted_for: a prompt that cannot be sampled still gives a trajectory, without tokens and
without rewards, so that its group can be completed and its place in the pipeline is given back.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
import xxhash
from pydantic import ValidationError

from producers.generation.rollout.chunks import TokenStream
from producers.generation.rollout.completion import Completion
from producers.generation.rollout.load import Load
from producers.rewards.runner import ScoreRequest, Scores
from schemas.errors import EngineError
from schemas.identifiers import make_trajectory_id
from schemas.messages.prompts import SamplingParams, WorkOrder
from schemas.messages.trajectories import FinishReason, Trajectory
from schemas.ports.engine import Engine, GenerationRequest, TokenDelta, Tokenizer

log = structlog.get_logger()

SHOWN_CHARACTERS = 1000
"""Of a prompt that cannot be sampled: enough to recognise it, and never too large to send."""


class Scorer(Protocol):
    """Scores completions; ``RewardRunner`` is one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards."""
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Rewards by name, and why those that failed did."""
        ...


@dataclass
class Rollout:
    """Samples for one worker; ``load`` counts what it does."""

    engine: Engine
    tokenizer: Tokenizer
    scorer: Scorer
    worker_id: str
    load: Load = field(default_factory=Load)
    tokens: TokenStream | None = None
    clock: Callable[[], float] = time.time

    async def sample(self, order: WorkOrder, sample_index: int, prompt_token_ids: Sequence[int]) -> Trajectory:
        """Sample and score one completion; a failing engine is asked once more.

        Raises:
            EngineError: it failed twice, or returned what is not a completion.
        """
        trajectory_id = make_trajectory_id(order.group_id, sample_index)
        request = GenerationRequest(trajectory_id, prompt_token_ids, _own_seed(order, trajectory_id), order.prompt)
        started_at = self.clock()
        self.load.generating += 1
        try:
            completion = await self._generate_twice(request)
        finally:
            self.load.generating -= 1
        text = self.tokenizer.decode(completion.token_ids)
        scores = await self._score(order, completion, text)
        token_ids, logprobs = completion.arrays()
        try:
            return Trajectory(
                **self._origin(order, sample_index),
                prompt_token_ids=np.array(prompt_token_ids, dtype="<i4"),
                token_ids=token_ids,
                logprobs=logprobs,
                loss_mask=np.ones(len(token_ids), dtype="<u1"),
                version_spans=completion.version_spans(),
                finish_reason=completion.finish_reason,
                prompt_text=order.prompt.text,
                completion_text=text,
                rewards=scores.rewards,
                reward_errors=scores.errors,
                started_at=started_at,
                finished_at=self.clock(),
            )
        except ValidationError as error:
            raise EngineError(f"expected a completion from {self.engine.name}, got: {error}") from error

    def refused(self, order: WorkOrder, sample_index: int, reason: str) -> Trajectory:
        """The trajectory of a sample that was never made, with the reason in place of each reward."""
        now = self.clock()
        return Trajectory(
            **self._origin(order, sample_index),
            prompt_token_ids=[],
            token_ids=[],
            logprobs=[],
            loss_mask=[],
            version_spans=(),
            finish_reason=FinishReason.ABORT,
            prompt_text=order.prompt.text[:SHOWN_CHARACTERS],
            completion_text="",
            rewards=dict.fromkeys(self.scorer.names),
            reward_errors=dict.fromkeys(self.scorer.names, reason),
            started_at=now,
            finished_at=now,
        )

    def _origin(self, order: WorkOrder, sample_index: int) -> dict[str, Any]:
        return {
            "trajectory_id": make_trajectory_id(order.group_id, sample_index),
            "group_id": order.group_id,
            "prompt_id": order.prompt.prompt_id,
            "dataset": order.prompt.dataset,
            "sample_index": sample_index,
            "num_generations": order.num_generations,
            "temperature": order.sampling.temperature,
            "bucket": order.estimate.bucket,
            "predicted_length": order.estimate.median,
            "worker_id": self.worker_id,
            "attempt": order.attempt,
            "admitted_version": order.admitted_version,
            "position": order.position,
            "due_step": order.due_step,
            "created_at": order.created_at,
        }

    async def _score(self, order: WorkOrder, completion: Completion, text: str) -> Scores:
        if completion.finish_reason is FinishReason.ABORT:
            names = self.scorer.names
            return Scores(dict.fromkeys(names), dict.fromkeys(names, "the engine gave up on the completion"))
        return await self.scorer.score(ScoreRequest(order.prompt, text, completion.token_ids))

    async def _generate_twice(self, request: GenerationRequest) -> Completion:
        try:
            return await self._generate(request)
        except EngineError as error:
            log.warning("request failed, asking once more", request=request.request_id, error=str(error))
            return await self._generate(request)

    async def _generate(self, request: GenerationRequest) -> Completion:
        completion = Completion()
        async with _closing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                start = len(completion.token_ids)
                completion.extend(delta)
                self.load.generated_tokens += len(delta.token_ids)
                if self.tokens is not None:
                    await self.tokens.send(request.request_id, start, delta)
        if completion.finish_reason is None:
            raise EngineError(f"expected a finish reason for {request.request_id} from {self.engine.name}, got none")
        return completion


@asynccontextmanager
async def _closing(deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[AsyncIterator[TokenDelta]]:
    """Closes an async generator when its reader leaves early, so that its slot in the engine is free at once."""
    try:
        yield deltas
    finally:
        if (close := getattr(deltas, "aclose", None)) is not None:
            await close()


def _own_seed(order: WorkOrder, trajectory_id: str) -> SamplingParams:
    """The order's seed is the run's: each sample of each attempt draws random numbers of its own from it."""
    sampling = order.sampling
    if sampling.seed is None:
        return sampling
    name = f"{trajectory_id}@{order.attempt}"
    seed = xxhash.xxh32_intdigest(name.encode(), seed=sampling.seed & 0xFFFFFFFF) & 0x7FFFFFFF
    return sampling.model_copy(update={"seed": seed})
