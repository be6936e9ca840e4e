"""Strategies: how a plan is made. All are pure functions of the items, the workers and the decode curve.

``skewness_aware`` is the default. The longest completions get workers of their own that run few at once, hence fast:
with t(b) the seconds of a decode step of a batch of b, a completion of L tokens is over by T only in a batch with

    L × t(b) <= T

So a target T says how many workers the long tail needs, how many of the longest items go there, and how many of them
run at once; the others are list-scheduled over what capacity is left, longest first. Targets are enumerated; the exact
finish of each plan decides.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heapify, heapreplace

from producers.dispatch.plans import (
    Item,
    LengthDraws,
    Plan,
    Strategy,
    WorkerCapacity,
    WorkerShare,
    conservative,
    predicted_finish_s,
    with_items,
)
from schemas.profiles import DecodeCurve

TARGETS = 8
"""Enumerated between the best that can be hoped for and what is reached without reserved workers; and again around the
best of them."""
ALPHA = 0.2
"""Share of all prompts that are the long tail in the StreamRL paper."""


def skewness_aware(
    items: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve, slack_s: float = 0.0
) -> Plan:
    """The plan with the earliest predicted finish; never later than that of ``round_robin`` or of ``lpt``.

    Where lengths are uncertain, that is the mean over draws of them, and the long tail is also planned at its upper
    estimates. ``slack_s``: a finish before that is worth nothing, so no capacity is given up for it.
    """
    draws = LengthDraws(items)
    # Lengths as estimated; and if some are uncertain, also with the longest at their upper estimates.
    views = [list(items)]
    if (tail_raised := conservative(items)) != views[0]:
        views.append(tail_raised)
    plans = [round_robin(items, workers, curve)]
    for view in views:
        ordered = longest_first(view)
        plans.append(with_items(list_schedule(ordered, workers, all_slots(workers), curve), items))
    # Over the same draws as every other plan, so that none of the simple ones is ever better than the result.
    best = min(plans, key=lambda plan: draws.mean_finish_s(plan, curve))
    if not items or draws.mean_finish_s(best, curve) <= slack_s:
        return best
    with_reserved = (with_items(_with_reserved_workers(view, workers, curve, slack_s), items) for view in views)
    return min((best, *with_reserved), key=lambda plan: draws.mean_finish_s(plan, curve))


def _with_reserved_workers(
    items: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve, slack_s: float
) -> Plan:
    """The best of the enumerated targets, if lengths are as these items say."""
    best = lpt(items, workers, curve)
    finish = predicted_finish_s(best, curve)
    ordered = longest_first(items)
    low, high = max(_least_s(ordered, workers, curve), slack_s), finish
    # First over the whole interval, then over the two steps around the best target.
    for _ in range(2):
        width = (high - low) / TARGETS
        if width <= 0:
            break
        # The best so far stays among them, so that the second round is never worse than the first.
        found = [(finish, high, best)]
        for number in range(TARGETS):
            target = low + number * width
            plan = _plan_for(target, ordered, workers, curve)
            found.append((predicted_finish_s(plan, curve), target, plan))
        finish, target, best = min(found, key=lambda entry: entry[0])
        low, high = max(low, target - width), min(high, target + width)
    return best


def _least_s(ordered: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve) -> float:
    """No plan is faster: all capacity busy until the end, or the longest completion running alone from the start.

    max(Σ tokens / Σ (slots / t(slots)), longest × t(1))
    """
    longest = max(ordered[0].longest, *(tokens for worker in workers for tokens in worker.running), 0)
    tokens = sum(item.load for item in ordered) + sum(worker.load for worker in workers)
    rate = sum(slots / curve.batch_s(slots) for slots in all_slots(workers))
    return max(tokens / rate, longest * curve.batch_s(1))


def _plan_for(target: float, ordered: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve) -> Plan:
    """The plan that reserves workers so that the longest items, and what runs already, are over by ``target``."""
    concurrency = all_slots(workers)
    reserved: dict[int, list[Item]] = {}
    taken = 0
    # A worker may have to run fewer from now on, so that what it has already is over in time.
    for number, worker in enumerate(workers):
        if worker.running and max(worker.running) * curve.batch_s(concurrency[number]) > target:
            # L × t(b) <= T asks for a step of T / L seconds at most.
            concurrency[number] = _batch_within(target / max(worker.running), concurrency[number], curve)
    # The longest items that would be late at full concurrency go to the workers with the fewest running, at the largest
    # concurrency that is fast enough for the first of them.
    for number in sorted(range(len(workers)), key=lambda number: len(workers[number].running)):
        if taken == len(ordered) or ordered[taken].longest * curve.batch_s(concurrency[number]) <= target:
            break
        concurrency[number] = _batch_within(target / ordered[taken].longest, concurrency[number], curve)
        reserved[number] = _first(ordered, taken, concurrency[number])
        taken += len(reserved[number])
    return list_schedule(ordered[taken:], workers, concurrency, curve, reserved)


def _batch_within(step_s: float, slots: int, curve: DecodeCurve) -> int:
    """The largest batch whose step takes no longer; at least 1."""
    # Bisection, since t grows with the batch.
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


def round_robin(items: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve) -> Plan:
    """The first item to the first worker, the second to the second, and so on, whatever their lengths are."""
    return Plan(
        tuple(
            WorkerShare(worker, max(1, worker.slots), tuple(items[number :: len(workers)]))
            for number, worker in enumerate(workers)
        )
    )


def least_loaded(items: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve) -> Plan:
    """In their own order, each to the worker with the fewest expected tokens for what it can do."""
    return list_schedule(items, workers, all_slots(workers), curve)


def lpt(items: Sequence[Item], workers: Sequence[WorkerCapacity], curve: DecodeCurve) -> Plan:
    """Longest processing time first: as ``least_loaded``, but the longest begin."""
    return list_schedule(longest_first(items), workers, all_slots(workers), curve)


def list_schedule(
    items: Sequence[Item],
    workers: Sequence[WorkerCapacity],
    concurrency: Sequence[int],
    curve: DecodeCurve,
    reserved: Mapping[int, Sequence[Item]] | None = None,
) -> Plan:
    """Each item in turn goes to the worker with the least expected seconds of work (Graham 1969).

    At its concurrency b a worker makes b tokens every t(b) seconds, so an item of L tokens keeps it busy L × t(b) / b.
    ``reserved``: by the worker's number, what its queue begins with.
    """
    queues: list[list[Item]] = [[*(reserved or {}).get(share, ())] for share in range(len(workers))]
    token_s = [curve.batch_s(at_once) / at_once for at_once in concurrency]
    # (seconds of work, number) of each worker, the least first; of equals the first worker.
    loads = [
        ((worker.load + sum(item.load for item in queues[share])) * token_s[share], share)
        for share, worker in enumerate(workers)
    ]
    heapify(loads)
    for item in items:
        busy_s, share = loads[0]
        queues[share].append(item)
        heapreplace(loads, (busy_s + item.load * token_s[share], share))
    return Plan(
        tuple(
            WorkerShare(worker, at_once, tuple(queue))
            for worker, at_once, queue in zip(workers, concurrency, queues, strict=True)
        )
    )


def longest_first(items: Sequence[Item]) -> list[Item]:
    """By the longest sample; among equals first those whose other samples are long, then in their own order."""
    return sorted(items, key=lambda item: (-item.longest, -item.tokens, item.key))


def all_slots(workers: Sequence[WorkerCapacity]) -> list[int]:
    """The concurrencies that leave no slot empty."""
    return [max(1, worker.slots) for worker in workers]


def streamrl_algorithm_2(
    items: Sequence[Item],
    workers: Sequence[WorkerCapacity],
    curve: DecodeCurve,
    *,
    total: Callable[[Iterable[float]], float],
) -> Plan:
    """Algorithm 2 of StreamRL (arXiv 2504.15930) as it is printed, for comparison.

    The longest ``ALPHA`` of all prompts are the long tail. For every split of the workers each pool's latency is

        PTL(BS) × L × ceil(M / BS)        (its equation 2)

    with M prompts on each worker, BS = min(M, slots), PTL the time of a token, and L the 90th percentile of all lengths
    for the long tail, the median for the rest. The paper adds the two latencies (``total`` sum), although the pools run
    at the same time; the later of the two (max) is the other reading. The split with the least total wins; items are
    dealt evenly to the workers of a pool, longest first. One worker or few items: ``lpt``.
    """
    ordered = longest_first(items)
    share = math.ceil(ALPHA * len(ordered))
    tail, rest = ordered[:share], ordered[share:]
    if len(workers) < 2 or not rest:
        return lpt(items, workers, curve)
    # The 90th percentile and the median of all lengths.
    long, regular = ordered[len(ordered) // 10].longest, ordered[len(ordered) // 2].longest

    def cost(split: int) -> float:
        first, second = workers[:split], workers[split:]
        return total((_latency_s(tail, long, first, curve), _latency_s(rest, regular, second, curve)))

    split = min(range(1, len(workers)), key=cost)
    return Plan(_evenly(tail, workers[:split]) + _evenly(rest, workers[split:]))


def _latency_s(pool: Sequence[Item], length: int, workers: Sequence[WorkerCapacity], curve: DecodeCurve) -> float:
    each = math.ceil(sum(item.samples for item in pool) / len(workers))
    batch = max(1, min(each, *(worker.slots for worker in workers)))
    # PTL(BS) × L × ceil(M / BS), with M = each and BS = batch.
    return curve.batch_s(batch) * length * math.ceil(each / batch)


def _evenly(pool: Sequence[Item], workers: Sequence[WorkerCapacity]) -> tuple[WorkerShare, ...]:
    return tuple(
        WorkerShare(worker, max(1, worker.slots), tuple(pool[number :: len(workers)]))
        for number, worker in enumerate(workers)
    )


streamrl_sum = partial(streamrl_algorithm_2, total=sum)
streamrl_max = partial(streamrl_algorithm_2, total=max)
STRATEGIES: dict[str, Strategy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "lpt": lpt,
    "skewness_aware": skewness_aware,
    "streamrl_sum": streamrl_sum,
    "streamrl_max": streamrl_max,
}
