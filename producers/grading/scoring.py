"""Asks the graded reward functions, and those that failed once more: an endpoint may be busy, a process have died."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from producers.rewards.runner import ScoreRequest, Scores

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Before a second call, and at most. Doubled each time, and up to half as long again: members do not call together."""


class Scorer(Protocol):
    """Calls reward functions; ``RewardRunner`` is one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards."""
        ...

    async def start(self) -> None:
        """Load the functions; raises ``RewardLoadError``."""
        ...

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        """Rewards by name, of all functions or ``only`` these, and why those that failed did."""
        ...

    async def close(self) -> None:
        """Release them; idempotent."""
        ...


async def scored(
    scorer: Scorer,
    request: ScoreRequest,
    attempts: int,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Scores:
    """The rewards of one completion; each function is called until it does not fail, at most ``attempts`` times."""
    rewards: dict[str, float | None] = {}
    only: Collection[str] | None = None
    for attempt in range(attempts):
        found = await scorer.score(request, only)
        rewards |= found.rewards
        if not found.errors or attempt + 1 == attempts:
            break
        only = tuple(found.errors)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
        await sleep(pause_s * random.uniform(1.0, 1.5))
    return Scores(rewards, found.errors)
