"""How long a lane takes, in seconds, if lengths are as expected: list scheduling, in decode steps. Pure.

While its queue is not empty a lane runs at its concurrency, so that steps take equally long; then its batch shrinks
and the steps become shorter. What a step takes longer for the tokens in its caches does not depend on the schedule: a
completion of L tokens adds ``context_s_per_token`` × L (L - 1) / 2, whenever it runs.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice

from producers.dispatch.planning.plans import Lane, Plan
from schemas.profiles.decode import DecodeCurve


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
