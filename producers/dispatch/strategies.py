"""The strategies by name. All are pure functions of the items, the workers and the decode curve."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heapify, heapreplace

from producers.dispatch.plans import Item, Lane, Plan, Strategy, Worker, predicted_finish
from producers.dispatch.uncertainty import Doubt, as_given, cautious
from schemas.profiles import DecodeCurve

# Spreads items over lanes, next to the one that would be free first. Pure.


def longest_first(items: Sequence[Item]) -> list[Item]:
    """By the longest sample; among equals first those whose other samples are long, then in their own order."""
    return sorted(items, key=lambda item: (-item.longest, -item.tokens, item.key))


def spread(
    items: Sequence[Item],
    workers: Sequence[Worker],
    concurrency: Sequence[int],
    curve: DecodeCurve,
    reserved: Mapping[int, Sequence[Item]] | None = None,
) -> Plan:
    """Each item in turn goes to the lane with the least expected seconds of work, at its concurrency's rate.

    ``reserved``: by lane, what it begins with.
    """
    queues: list[list[Item]] = [[*(reserved or {}).get(lane, ())] for lane in range(len(workers))]
    token_s = [curve.batch_s(at_once) / at_once for at_once in concurrency]
    loads = [
        ((worker.load + sum(item.load for item in queues[lane])) * token_s[lane], lane)
        for lane, worker in enumerate(workers)
    ]
    heapify(loads)
    for item in items:
        busy_s, lane = loads[0]
        queues[lane].append(item)
        heapreplace(loads, (busy_s + item.load * token_s[lane], lane))
    return Plan(
        tuple(
            Lane(worker, at_once, tuple(queue))
            for worker, at_once, queue in zip(workers, concurrency, queues, strict=True)
        )
    )


def all_slots(workers: Sequence[Worker]) -> list[int]:
    """The concurrencies that leave no slot empty."""
    return [max(1, worker.slots) for worker in workers]


# Plans that keep every slot busy and look at lengths little or not at all. Pure.


def round_robin(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    """The first item to the first worker, the second to the second, and so on, whatever their lengths are."""
    return Plan(
        tuple(
            Lane(worker, max(1, worker.slots), tuple(items[number :: len(workers)]))
            for number, worker in enumerate(workers)
        )
    )


def least_loaded(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    """In their own order, each to the worker with the fewest expected tokens for what it can do."""
    return spread(items, workers, all_slots(workers), curve)


def lpt(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    """Longest processing time first: as ``least_loaded``, but the longest begin."""
    return spread(longest_first(items), workers, all_slots(workers), curve)


# Algorithm 2 of the StreamRL paper as it is printed, for comparison. Pure. The longest ``ALPHA`` of all prompts are
# its long tail. For every split of the workers each pool's latency is PTL(BS) × L × ceil(M / BS) (its equation 2),
# with M prompts on each worker, BS = min(M, slots), and L the 90th percentile of all lengths for the long tail, the
# median for the rest. The paper adds the two latencies, although the pools run at the same time; the later of the two
# is the other reading. Pools are spread evenly; longest first on each worker.

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


# Skewness-aware plans: the longest completions get workers of their own that run few at once, hence fast. Pure. A
# completion of L tokens must run in a batch b with L × t(b) <= T to be over by T. So a target T says how many workers
# the long tail needs, how many of the longest items go there, and how many of them run at once; the others are spread
# over what capacity is left, longest first. Targets are enumerated; the exact makespan of each plan decides. Of
# uncertain lengths the median counts, not an upper estimate: a completion that outgrows it is noticed and makes the
# rest be planned anew, whereas a lane that is reserved for too long a completion wastes its slots unnoticed.

TARGETS = 8
"""Enumerated between the best that can be hoped for and what is reached without lanes; and again around the best."""


def skewness_aware(
    items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve, patience_s: float = 0.0
) -> Plan:
    """The plan with the earliest predicted finish; never later than that of ``round_robin`` or of ``lpt``.

    Where lengths are in doubt, that is the mean over draws of them, and the long tail is also planned at its upper
    estimates. ``patience_s``: a finish before that is worth nothing, so no capacity is given up for it.
    """
    doubt = Doubt(items)
    views = [list(items)]
    if (careful := cautious(items)) != views[0]:
        views.append(careful)
    plans = [round_robin(items, workers, curve)]
    for view in views:
        ordered = longest_first(view)
        plans.append(as_given(spread(ordered, workers, all_slots(workers), curve), items))
    best = min(plans, key=lambda plan: doubt.finish_s(plan, curve))
    if not items or doubt.finish_s(best, curve) <= patience_s:
        return best
    with_lanes = (as_given(_with_lanes(view, workers, curve, patience_s), items) for view in views)
    return min((best, *with_lanes), key=lambda plan: doubt.finish_s(plan, curve))


def _with_lanes(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve, patience_s: float) -> Plan:
    """The best of the enumerated targets, if lengths are as these items say."""
    best = lpt(items, workers, curve)
    finish = predicted_finish(best, curve)
    ordered = longest_first(items)
    low, high = max(_least_s(ordered, workers, curve), patience_s), finish
    for _ in range(2):
        width = (high - low) / TARGETS
        if width <= 0:
            break
        found = [(finish, high, best)]
        for number in range(TARGETS):
            target = low + number * width
            plan = _plan_for(target, ordered, workers, curve)
            found.append((predicted_finish(plan, curve), target, plan))
        finish, target, best = min(found, key=lambda entry: entry[0])
        low, high = max(low, target - width), min(high, target + width)
    return best


def _least_s(ordered: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> float:
    """No plan is faster: all capacity busy until the end, and the longest completion running alone from the start."""
    longest = max(ordered[0].longest, *(tokens for worker in workers for tokens in worker.running), 0)
    tokens = sum(item.load for item in ordered) + sum(worker.load for worker in workers)
    rate = sum(slots / curve.batch_s(slots) for slots in all_slots(workers))
    return max(tokens / rate, longest * curve.batch_s(1))


def _plan_for(target: float, ordered: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    concurrency = all_slots(workers)
    reserved: dict[int, list[Item]] = {}
    taken = 0
    for number, worker in enumerate(workers):
        if worker.running and max(worker.running) * curve.batch_s(concurrency[number]) > target:
            concurrency[number] = _batch_within(target / max(worker.running), concurrency[number], curve)
    for number in sorted(range(len(workers)), key=lambda number: len(workers[number].running)):
        if taken == len(ordered) or ordered[taken].longest * curve.batch_s(concurrency[number]) <= target:
            break
        concurrency[number] = _batch_within(target / ordered[taken].longest, concurrency[number], curve)
        reserved[number] = _first(ordered, taken, concurrency[number])
        taken += len(reserved[number])
    return spread(ordered[taken:], workers, concurrency, curve, reserved)


def _batch_within(step_s: float, slots: int, curve: DecodeCurve) -> int:
    """The largest batch whose step takes no longer; at least 1."""
    low, high = 1, slots
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if curve.batch_s(middle) <= step_s else (low, middle - 1)
    return low


def _first(ordered: Sequence[Item], start: int, samples: int) -> list[Item]:
    """As many of the next items as fill so many slots; one at least."""
    end = start
    while end < len(ordered) and (end == start or samples >= ordered[end].samples):
        samples -= ordered[end].samples
        end += 1
    return list(ordered[start:end])


STRATEGIES: dict[str, Strategy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "lpt": lpt,
    "skewness_aware": skewness_aware,
    "paper_sum": paper_sum,
    "paper_max": paper_max,
}
