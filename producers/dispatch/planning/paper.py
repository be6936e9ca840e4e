"""Algorithm 2 of the StreamRL paper as it is printed, for comparison. Pure.

The longest ``ALPHA`` of all prompts are its long tail. For every split of the workers each pool's latency is PTL(BS) ×
L × ceil(M / BS) (its equation 2), with M prompts on each worker, BS = min(M, slots), and L the 90th percentile of all
lengths for the long tail, the median for the rest. The paper adds the two latencies, although the pools run at the same
time; the later of the two is the other reading. Pools are spread evenly; longest first on each worker.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from producers.dispatch.planning.baselines import lpt
from producers.dispatch.planning.plans import Item, Lane, Plan, Worker
from producers.dispatch.planning.spreading import longest_first
from schemas.profiles.decode import DecodeCurve

ALPHA = 0.2


def algorithm_2(
    items: Sequence[Item],
    workers: Sequence[Worker],
    curve: DecodeCurve,
    *,
    total: Callable[[Iterable[float]], float],
) -> Plan:
    """The split with the least ``total`` (sum or max) of both latencies; one worker or few items: ``lpt``."""
    ordered = longest_first(items)
    share = math.ceil(ALPHA * len(ordered))
    tail, rest = ordered[:share], ordered[share:]
    if len(workers) < 2 or not rest:
        return lpt(items, workers, curve)
    long, regular = ordered[len(ordered) // 10].longest, ordered[len(ordered) // 2].longest

    def cost(split: int) -> float:
        first, second = workers[:split], workers[split:]
        return total((_latency_s(tail, long, first, curve), _latency_s(rest, regular, second, curve)))

    split = min(range(1, len(workers)), key=cost)
    return Plan(_evenly(tail, workers[:split]) + _evenly(rest, workers[split:]))


def _latency_s(pool: Sequence[Item], length: int, workers: Sequence[Worker], curve: DecodeCurve) -> float:
    each = math.ceil(sum(item.samples for item in pool) / len(workers))
    batch = max(1, min(each, *(worker.slots for worker in workers)))
    return curve.batch_s(batch) * length * math.ceil(each / batch)


def _evenly(pool: Sequence[Item], workers: Sequence[Worker]) -> tuple[Lane, ...]:
    return tuple(
        Lane(worker, max(1, worker.slots), tuple(pool[number :: len(workers)])) for number, worker in enumerate(workers)
    )


paper_sum = partial(algorithm_2, total=sum)
paper_max = partial(algorithm_2, total=max)
