"""Queues as a dispatch strategy plans them, from what a ranker says of the lengths."""

import math
import random
from collections.abc import Sequence

from benchmarks.pipeline.bounds.realised import Queue
from producers.dispatch.plans import Item, WorkerCapacity
from producers.dispatch.strategies import STRATEGIES
from schemas.profiles import DecodeCurve


def planned(
    strategy: str, lengths: Sequence[int], predicted: Sequence[float], workers: int, slots: int, curve: DecodeCurve
) -> list[Queue]:
    """The strategy's plan for idle workers, executed to the letter: no item moves afterwards."""
    items = [Item(key, max(1, round(tokens))) for key, tokens in enumerate(predicted)]
    fleet = [WorkerCapacity(f"worker-{number}", slots) for number in range(workers)]
    plan = STRATEGIES[strategy](items, fleet, curve)
    return [Queue(tuple(lengths[item.key] for item in share.items), share.concurrency) for share in plan.shares]


def noisy(lengths: Sequence[int], sigma: float, rng: random.Random) -> list[float]:
    """What a ranker says that errs by a log-normal factor."""
    return [length * math.exp(rng.gauss(0.0, sigma)) for length in lengths]
