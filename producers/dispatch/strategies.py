"""Strategies: how a plan is made. All are pure functions of the items and the workers.

``skewness_aware`` is the default. It reserves workers for the longest completions. These workers run few completions at
once, so each is fast: with t(b) the seconds of a decode step of a batch of b, a completion of L tokens ends by time T
only in a batch with

    L × t(b) <= T

So a target T determines how many workers the long tail needs, how many of the longest items go there, and how many of
them run at once. The other items are list-scheduled over the remaining capacity, longest first. Several targets are
tried, and the plan with the best exact outcome wins.

The mode determines which outcome counts (``Objective``). If training starts when the batch is complete, it is the
makespan, for which longest first is the best order. If the trainer takes groups as they end, longest first starves the
trainer: early completions end late, and then all work arrives at once. So for such a trainer each target is also tried
with the rest of each queue in prompt order, and shortest first. Short completions then feed the trainer while the long
ones run on their reserved workers from the start. With a trainer slower than generation, shortest first wins; with a
faster one the makespan counts, and longest first wins; in between the outcome decides.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heapreplace

from streamrl.producers.dispatch.plans import (
    MAKESPAN,
    Item,
    LengthDraws,
    Objective,
    Plan,
    Strategy,
    WorkerCapacity,
    WorkerShare,
    conservative,
    predicted_s,
    with_items,
)
from streamrl.schemas.profiles import DecodeCurve

TARGETS = 8
"""Targets tried between the lower bound and the time without reserved workers, and again around the best of them."""
ALPHA = 0.2
"""Share of all prompts that the StreamRL paper treats as the long tail."""


def skewness_aware(items: Sequence[Item], workers: Sequence[WorkerCapacity], objective: Objective = MAKESPAN) -> Plan:
    """The plan with the best predicted outcome; never worse than ``round_robin``, ``least_loaded`` or ``lpt``.

    If lengths are uncertain, the outcome is the mean over draws of them, and the long tail is also planned at its upper
    estimates. No workers are reserved if the outcome is within ``objective.slack_s`` without.
    """
    draws = LengthDraws(items)
    # Lengths as estimated; if some are uncertain, also with the longest at their upper estimates.
    views = [list(items)]
    if (tail_raised := conservative(items)) != views[0]:
        views.append(tail_raised)
    plans = [round_robin(items, workers), least_loaded(items, workers)]
    plans += [with_items(plan, items) for view in views for plan in _with_other_orders(lpt(view, workers), objective)]
    # All plans are compared over the same draws, so that no simple strategy is better than the result.
    outcome, best = min(((draws.mean_s(plan, objective), plan) for plan in plans), key=lambda entry: entry[0])
    if not items or outcome <= objective.slack_s:
        return best
    with_reserved = (with_items(_with_reserved_workers(view, workers, objective), items) for view in views)
    return min((best, *with_reserved), key=lambda plan: draws.mean_s(plan, objective))


def _with_reserved_workers(items: Sequence[Item], workers: Sequence[WorkerCapacity], objective: Objective) -> Plan:
    """The best plan over the targets tried, if lengths are as estimated."""
    known: dict[tuple[tuple[int, tuple[int, ...]], ...], float] = {}

    def outcome_of(plan: Plan) -> float:
        # Many targets lead to the same plan, and evaluating plans takes most of the time.
        key = tuple((share.concurrency, tuple(item.key for item in share.items)) for share in plan.shares)
        if key not in known:
            known[key] = predicted_s(plan, objective)
        return known[key]

    best = lpt(items, workers)
    outcome, high = outcome_of(best), predicted_s(best)
    ordered = longest_first(items)
    low = max(_least_s(ordered, workers), objective.slack_s)
    # First over the whole interval, then over the two steps around the best target.
    for _ in range(2):
        width = (high - low) / TARGETS
        if width <= 0:
            break
        # The best so far is kept, so that the second round is never worse than the first.
        found = [(outcome, high, best)]
        for number in range(TARGETS):
            target = low + number * width
            plans = _with_other_orders(_plan_for(target, ordered, workers), objective)
            found += [(outcome_of(plan), target, plan) for plan in plans]
        outcome, target, best = min(found, key=lambda entry: entry[0])
        low, high = max(low, target - width), min(high, target + width)
    return best


def _with_other_orders(plan: Plan, objective: Objective) -> Iterator[Plan]:
    """The plan; and if the trainer takes groups as they end, the same plan with other orders within the queues.

    A reserved worker's queue keeps its first items, the longest, which fill its concurrency.
    """
    yield plan
    if not objective.train_s_per_token:
        return

    def ordered(share: WorkerShare, key: Callable[[Item], float]) -> WorkerShare:
        count, kept = share.concurrency if share.is_reduced else 0, 0
        while kept < len(share.items) and count > 0:
            count, kept = count - share.items[kept].samples, kept + 1
        return replace(share, items=(*share.items[:kept], *sorted(share.items[kept:], key=key)))

    yield Plan(tuple(ordered(share, lambda item: item.key) for share in plan.shares))
    yield Plan(tuple(ordered(share, lambda item: item.longest) for share in plan.shares))


def _least_s(ordered: Sequence[Item], workers: Sequence[WorkerCapacity]) -> float:
    """Lower bound of any plan's seconds: all slots busy until the end, or the longest completion alone from the start.

    max(Σ tokens / Σ (slots / t(slots)), longest × the fastest t(1))
    """
    alone_s = min(worker.curve.batch_s(1) for worker in workers)
    longest = max(
        ordered[0].longest * alone_s, *(max(worker.running, default=0) * worker.curve.batch_s(1) for worker in workers)
    )
    tokens = sum(item.load for item in ordered) + sum(worker.load for worker in workers)
    return max(tokens / full_rate(workers), longest)


def full_rate(workers: Iterable[WorkerCapacity]) -> float:
    """Tokens per second of all workers with all slots busy: Σ slots / t(slots)."""
    return sum(max(1, worker.slots) / worker.curve.batch_s(max(1, worker.slots)) for worker in workers)


def _plan_for(target: float, ordered: Sequence[Item], workers: Sequence[WorkerCapacity]) -> Plan:
    """The plan that reserves workers so that the longest items, and running completions, end by ``target``."""
    concurrency = all_slots(workers)
    reserved: dict[int, list[Item]] = {}
    taken = 0
    # Reduce the concurrency of workers whose running completions would end late.
    for number, worker in enumerate(workers):
        if worker.running and max(worker.running) * worker.curve.batch_s(concurrency[number]) > target:
            # From L × t(b) <= T: a step may take at most T / L seconds.
            concurrency[number] = _batch_within(target / max(worker.running), concurrency[number], worker.curve)
    # Reserve workers for the longest items, while these would be late at full concurrency. Workers with the fewest
    # running completions come first, then the fastest. Each gets the largest concurrency that is fast enough for its
    # first item.
    for number, worker in sorted(enumerate(workers), key=lambda one: (len(one[1].running), one[1].curve.batch_s(1))):
        if taken == len(ordered) or ordered[taken].longest * worker.curve.batch_s(concurrency[number]) <= target:
            break
        concurrency[number] = _batch_within(target / ordered[taken].longest, concurrency[number], worker.curve)
        reserved[number] = _next_items(ordered, taken, concurrency[number])
        taken += len(reserved[number])
    return list_schedule(ordered[taken:], workers, concurrency, reserved)


def _batch_within(step_s: float, slots: int, curve: DecodeCurve) -> int:
    """The largest batch whose step takes at most ``step_s``; at least 1."""
    # Bisection, because t grows with the batch.
    low, high = 1, slots
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if curve.batch_s(middle) <= step_s else (low, middle - 1)
    return low


def _next_items(ordered: Sequence[Item], start: int, samples: int) -> list[Item]:
    """The next items that fit into ``samples`` slots; at least one."""
    end = start
    while end < len(ordered) and (end == start or samples >= ordered[end].samples):
        samples -= ordered[end].samples
        end += 1
    return list(ordered[start:end])


def round_robin(items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> Plan:
    """Items dealt to the workers in turn, regardless of length."""
    return Plan(
        tuple(
            WorkerShare(worker, max(1, worker.slots), tuple(items[number :: len(workers)]))
            for number, worker in enumerate(workers)
        )
    )


def least_loaded(items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> Plan:
    """Each item, in the given order, to the worker with the fewest expected tokens relative to its speed."""
    return list_schedule(items, workers, all_slots(workers))


def lpt(items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> Plan:
    """Longest processing time first: as ``least_loaded``, with the longest items first."""
    return list_schedule(longest_first(items), workers, all_slots(workers))


def list_schedule(
    items: Sequence[Item],
    workers: Sequence[WorkerCapacity],
    concurrency: Sequence[int],
    reserved: Mapping[int, Sequence[Item]] | None = None,
) -> Plan:
    """A plan in which each item in turn goes to the worker with the least expected seconds of work (Graham 1969).

    At concurrency b a worker makes b tokens every t(b) seconds, so an item of L tokens takes L × t(b) / b seconds.
    ``reserved``: the items that a worker's queue starts with, by the worker's number.
    """
    queues: list[list[Item]] = [[*(reserved or {}).get(share, ())] for share in range(len(workers))]
    context = _mean_context(items) if any(worker.kv_tokens is not None for worker in workers) else 0.0
    token_s = []
    for worker, at_once in zip(workers, concurrency, strict=True):
        # Equation 2 of StreamRL: the cache limits the batch if it holds fewer contexts than there are slots.
        batch = at_once if worker.kv_tokens is None else max(1, min(at_once, int(worker.kv_tokens / context)))
        token_s.append(worker.curve.batch_s(batch) / batch)
    # Heap of (seconds of work, worker's number): the least work first, and the lowest number among equals.
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


def _mean_context(items: Sequence[Item]) -> float:
    """Mean over time of the tokens that a running completion has in the cache: Σ L (p + L / 2) / Σ L; at least 1."""
    rows = [(length, item.prompt) for item in items for length in item.lengths]
    tokens = sum(length for length, _ in rows)
    return max(1.0, sum(length * (prompt + length / 2) for length, prompt in rows) / max(1, tokens))


def longest_first(items: Sequence[Item]) -> list[Item]:
    """Items by their longest sample, then by the length of their other samples, then by key."""
    return sorted(items, key=lambda item: (-item.longest, -item.tokens, item.key))


def all_slots(workers: Sequence[WorkerCapacity]) -> list[int]:
    """The concurrencies that use all slots."""
    return [max(1, worker.slots) for worker in workers]


def streamrl_algorithm_2(
    items: Sequence[Item],
    workers: Sequence[WorkerCapacity],
    *,
    total: Callable[[Iterable[float]], float],
) -> Plan:
    """The plan of algorithm 2 of StreamRL (arXiv 2504.15930) as printed, for comparison.

    The longest ``ALPHA`` of all prompts are the long tail. For every split of the workers each pool's latency is

        PTL(BS) × L × ceil(M / BS)        (its equation 2)

    with M prompts on each worker, BS = min(M, slots, contexts of length L that the cache holds), PTL the time per
    token, and L the 90th percentile of all lengths for the long tail and the median for the rest. The paper adds the
    two latencies (``total`` sum), although the pools run at the same time; the alternative is the larger one (max). The
    split with the least total wins; items are dealt evenly to the workers of a pool, longest first. With one worker or
    few items the plan is that of ``lpt``.
    """
    ordered = longest_first(items)
    share = math.ceil(ALPHA * len(ordered))
    tail, rest = ordered[:share], ordered[share:]
    if len(workers) < 2 or not rest:
        return lpt(items, workers)
    # The 90th percentile and the median of all lengths.
    long, regular = ordered[len(ordered) // 10].longest, ordered[len(ordered) // 2].longest

    def cost(split: int) -> float:
        first, second = workers[:split], workers[split:]
        return total((_latency_s(tail, long, first), _latency_s(rest, regular, second)))

    split = min(range(1, len(workers)), key=cost)
    return Plan(_evenly(tail, workers[:split]) + _evenly(rest, workers[split:]))


def _latency_s(pool: Sequence[Item], length: int, workers: Sequence[WorkerCapacity]) -> float:
    """Seconds of the pool on the slowest of these workers; in the paper all workers are equal."""
    each = math.ceil(sum(item.samples for item in pool) / len(workers))
    context = length + max(item.prompt for item in pool)

    def latency_s(worker: WorkerCapacity) -> float:
        cached = worker.slots if worker.kv_tokens is None else worker.kv_tokens // context
        batch = max(1, min(each, worker.slots, cached))
        # PTL(BS) × L × ceil(M / BS), with M = each and BS = batch.
        return worker.curve.batch_s(batch) * length * math.ceil(each / batch)

    return max(map(latency_s, workers))


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
STATIC = frozenset({"round_robin"})
"""Strategies whose plan is followed to its end: idle workers take nothing from other queues, and no new plan is made
because a completion outgrew its estimate.
"""
WITH_OBJECTIVE: dict[str, Callable[..., Plan]] = {"skewness_aware": skewness_aware}
"""Strategies that compare plans by the objective of the run's mode."""
