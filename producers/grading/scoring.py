"""Asks the graded reward functions, and those that failed once more: an endpoint may be busy, a process have died."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_exponential

from streamrl.producers.rewards.runner import RewardScorer, ScoreRequest, Scores

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Before a second call, and at most. Doubled each time, and up to half as long again: members do not call together."""


class Scorer(RewardScorer, Protocol):
    """Calls reward functions one by one as well; ``RewardRunner`` is one."""

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        """Rewards by name, of all functions or ``only`` these, and why those that failed did."""
        ...


async def scored(
    scorer: Scorer,
    request: ScoreRequest,
    attempts: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Scores:
    """The rewards of one completion; each function is called until it does not fail, at most ``attempts`` times."""
    rewards: dict[str, float | None] = {}
    failing: Collection[str] | None = None

    async def score() -> Scores:
        nonlocal failing
        found = await scorer.score(request, failing)
        rewards.update(found.rewards)
        failing = tuple(found.errors)
        return found

    patiently = AsyncRetrying(
        sleep=sleep,
        retry=retry_if_result(lambda found: bool(found.errors)),
        stop=stop_after_attempt(attempts),
        wait=_pause_s,
        # The last one's errors stand.
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )
    found: Scores = await patiently(score)
    return Scores(rewards, found.errors)


_doubled_s = wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)


def _pause_s(state: RetryCallState) -> float:
    return _doubled_s(state) * random.uniform(1.0, 1.5)
