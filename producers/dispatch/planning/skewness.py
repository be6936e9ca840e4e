"""Skewness-aware plans: the longest completions get workers of their own that run few at once, hence fast. Pure.

A completion of L tokens must run in a batch b with L × t(b) <= T to be over by T. So a target T says how many workers
the long tail needs, how many of the longest items go there, and how many of them run at once; the others are spread
over what capacity is left, longest first. Targets are enumerated; the exact makespan of each plan decides.

Of uncertain lengths the median counts, not an upper estimate: a completion that outgrows it is noticed and makes the
rest be planned anew, whereas a lane that is reserved for too long a completion wastes its slots unnoticed.
"""

from collections.abc import Sequence

from producers.dispatch.planning.baselines import lpt, round_robin
from producers.dispatch.planning.doubt import Doubt, as_given, cautious
from producers.dispatch.planning.makespan import predicted_finish
from producers.dispatch.planning.plans import Item, Plan, Worker
from producers.dispatch.planning.spreading import all_slots, longest_first, spread
from schemas.profiles.decode import DecodeCurve

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
