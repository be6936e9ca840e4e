"""Calls the graded reward functions, and retries those that failed: an endpoint may be busy, or a process have died."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_exponential

from streamrl.producers.rewards.runner import RewardScorer, ScoreRequest, Scores

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Seconds before the second call, and at most. The pause doubles each time, plus a random part of up to half of it, so
that members do not call at the same time."""


class Scorer(RewardScorer, Protocol):
    """Scores completions, also with only some of the functions; ``RewardRunner`` is one."""

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        """Rewards by name, of all functions or ``only`` these, and the reasons of those that failed."""
        ...


async def scored(
    scorer: Scorer,
    request: ScoreRequest,
    attempts: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Scores:
    """The rewards of one completion; each function is called until it succeeds, at most ``attempts`` times."""
    rewards: dict[str, float | None] = {}
    failing: Collection[str] | None = None

    async def score() -> Scores:
        nonlocal failing
        found = await scorer.score(request, failing)
        rewards.update(found.rewards)
        failing = tuple(found.errors)
        return found

    retrying = AsyncRetrying(
        sleep=sleep,
        retry=retry_if_result(lambda found: bool(found.errors)),
        stop=stop_after_attempt(attempts),
        wait=_pause_s,
        # After the last attempt its errors are returned.
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )
    found: Scores = await retrying(score)
    return Scores(rewards, found.errors)


_doubled_s = wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)


def _pause_s(state: RetryCallState) -> float:
    return _doubled_s(state) * random.uniform(1.0, 1.5)
