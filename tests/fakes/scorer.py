"""A scorer in this process: one reward by name, the completion's length unless told otherwise."""

from collections.abc import Callable
from dataclasses import dataclass

from producers.rewards.runner import ScoreRequest, Scores


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
