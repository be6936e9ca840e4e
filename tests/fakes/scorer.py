"""A scorer in this process: one reward by name, the completion's length unless told otherwise."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from streamrl.producers.rewards.runner import ScoreRequest, Scores


@dataclass
class FakeScorer:
    """``reward`` scores a request."""

    names: tuple[str, ...] = ("length",)
    reward: Callable[[ScoreRequest], float | None] = lambda request: float(len(request.completion_ids))
    start_error: Exception | None = None
    closed: bool = False

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    async def score(self, request: ScoreRequest) -> Scores:
        return Scores({name: self.reward(request) for name in self.names}, {})

    async def close(self) -> None:
        self.closed = True


@dataclass
class SlowScorer(FakeScorer):
    """Answers once ``may_answer`` is set."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(self, request: ScoreRequest) -> Scores:
        await self.may_answer.wait()
        return await super().score(request)
