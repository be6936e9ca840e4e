"""How long a lane takes, in seconds, if lengths are as expected: list scheduling, in decode steps. Pure.

While its queue is not empty a lane runs at its concurrency, so that steps take equally long; then its batch shrinks
and the steps become shorter. What a step takes longer for the tokens in its caches does not depend on the schedule: a
completion of L tokens adds ``context_s_per_token`` × L (L - 1) / 2, whenever it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice

from schemas.errors import LifecycleError
from schemas.profiles import DecodeCurve

# What a plan is made of and for. Pure; lengths in tokens, times in seconds, and no knowledge of topics.


@dataclass(frozen=True, slots=True)
class Item:
    """One group to be sampled, all on one worker: so many samples, most of them about so many tokens long.

    ``upper``: what nearly all samples end below. Of several samples the longest is expected to reach it.
    """

    key: int
    tokens: int
    samples: int = 1
    upper: int = 0

    @property
    def load(self) -> int:
        """Expected tokens of all its samples."""
        return self.tokens * (self.samples - 1) + self.longest

    @property
    def longest(self) -> int:
        """Expected tokens of its longest sample."""
        return self.tokens if self.samples == 1 else max(self.tokens, self.upper)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Expected tokens of each sample, the longest first."""
        return (self.longest, *(self.tokens,) * (self.samples - 1))


@dataclass(frozen=True, slots=True)
class Worker:
    """Who can sample: ``slots`` completions at once.

    ``running``: expected tokens left of those it runs already; ``waiting``: of those that it was sent beyond its slots.
    """

    worker_id: str
    slots: int
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()

    @property
    def load(self) -> int:
        """Expected tokens of what it has."""
        return sum(self.running) + sum(self.waiting)


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's share of a plan: its items in order, at most ``concurrency`` completions at once."""

    worker: Worker
    concurrency: int
    items: tuple[Item, ...] = ()

    @property
    def is_reduced(self) -> bool:
        """Whether slots stay empty on purpose, so that long completions run fast."""
        return self.concurrency < self.worker.slots


@dataclass(frozen=True, slots=True)
class Plan:
    """One lane for each worker."""

    lanes: tuple[Lane, ...]

    def checked(self, items: Sequence[Item], workers: Sequence[Worker]) -> "Plan":
        """The plan itself.

        Raises:
            LifecycleError: an item is in no lane or in two, a worker is left out, or a concurrency is impossible.
        """
        planned = sorted(item.key for lane in self.lanes for item in lane.items)
        if planned != sorted(item.key for item in items):
            raise LifecycleError(f"expected each of {len(items)} items in one lane, got {len(planned)} in all lanes")
        if [lane.worker.worker_id for lane in self.lanes] != [worker.worker_id for worker in workers]:
            raise LifecycleError("expected one lane for each worker, in the order of the workers")
        if wrong := [lane.concurrency for lane in self.lanes if not 1 <= lane.concurrency <= max(1, lane.worker.slots)]:
            raise LifecycleError(f"expected a concurrency from 1 to the worker's slots, got {wrong[0]}")
        return self


Strategy = Callable[[Sequence[Item], Sequence[Worker], DecodeCurve], Plan]
"""Items in the order in which they would be sent, all workers that may take some, and how fast they decode."""


def predicted_finish(plan: Plan, curve: DecodeCurve) -> float:
    """Seconds until the last lane is empty."""
    return max((lane_finish(lane, curve) for lane in plan.lanes), default=0.0)


def lane_finish(lane: Lane, curve: DecodeCurve) -> float:
    """Seconds until a worker has sampled what it runs already and everything in its lane."""
    lengths = [*lane.worker.waiting, *chain.from_iterable(item.lengths for item in lane.items)]
    return finish_s(lengths, lane.concurrency, curve, lane.worker.running)


def finish_s(lengths: Sequence[int], concurrency: int, curve: DecodeCurve, running: Sequence[int] = ()) -> float:
    """Seconds to sample completions of these lengths in this order, at most so many at once.

    ``running``: tokens left of the completions that run at the start, which may be more than that.
    """
    batch = [*running, *lengths[: max(0, concurrency - len(running))]]
    waiting = islice(lengths, len(batch) - len(running), None)
    heapify(batch)
    seconds, steps = _contexts_s(lengths, curve), 0
    while len(batch) > max(1, concurrency):
        seconds, steps = _retire(batch, seconds, steps, curve)
    began, step_s = steps, curve.batch_s(len(batch))
    for length in waiting:
        steps = batch[0]
        heapreplace(batch, steps + length)
    seconds += (steps - began) * step_s
    while batch:
        seconds, steps = _retire(batch, seconds, steps, curve)
    return seconds


def _retire(batch: list[int], seconds: float, steps: int, curve: DecodeCurve) -> tuple[float, int]:
    step_s, end = curve.batch_s(len(batch)), heappop(batch)
    return seconds + (end - steps) * step_s, end


def _contexts_s(lengths: Sequence[int], curve: DecodeCurve) -> float:
    per_token = curve.settings.context_s_per_token
    return per_token * sum(length * (length - 1) / 2 for length in lengths) if per_token else 0.0
