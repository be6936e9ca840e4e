"""Plans: which worker samples which groups, how long that takes, and what it is worth if lengths are uncertain. Pure.

Lengths in tokens, times in seconds by the worker's own decode curve: t(b) is a decode step of a batch of b completions.

While its queue is not empty a worker runs at its concurrency, so that steps take equally long; then its batch shrinks
and the steps become shorter. What a step takes longer for the tokens in its caches does not depend on the schedule: a
completion of L tokens behind a prompt of p adds ``context_s_per_token`` × (L (L - 1) / 2 + p L), whenever it runs.

A worker's key-value cache bounds its batch as its slots do (StreamRL, arXiv 2504.15930, equation 2, where the cache
caps the batch size): a completion begins only if, as far as lengths are known, the contexts of all that run will fit
into ``kv_tokens`` at every later moment. An engine that is given more drops what it sampled last and computes it again.

What a plan is worth is when the trainer will be through with it (``Objective``), which is not always when the last
completion ends.

An estimate's upper quantile says how far off it may be: log-normal around the median, the upper one at 90 %. A
completion that is underestimated starts late and ends last, which costs more than the room that an overestimated one
wastes. So the long tail may be planned at its upper estimates, and plans are compared over draws of what may come.
"""

import math
import random
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, chain
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from streamrl.schemas.errors import LifecycleError
from streamrl.schemas.profiles import TYPICAL_CURVE, DecodeCurve

TAIL_SHARE = 0.2
"""Of all items, the longest that a conservative plan takes at their upper estimates: the paper's long tail (StreamRL,
arXiv 2504.15930, section 4)."""
DRAWS = 5
"""Over which plans are compared: few, since every plan is evaluated over each of them."""
TIE = 1e-3
"""Weight of the makespan beside the trainer's end: small, and yet more than what rounding is."""
STILL_TO_COME = 0.5
"""Mean excess of a heavy tail, as a share of what is there: lengths whose survival falls as L^-3 have it at any L."""
CREDIBLE = 3.0
"""Deviations from the median up to which an estimate's own distribution is believed."""
_NORMAL = NormalDist()
_UPPER = _NORMAL.inv_cdf(0.9)
"""Deviations from the median to the upper estimate: 1.28."""


@dataclass(frozen=True, slots=True)
class Item:
    """One group to be sampled, all on one worker: so many samples, most of them about so many tokens long.

    ``upper``: what nearly all samples end below. Of several samples the longest is expected to reach it.
    ``prompt``: tokens of the prompt, which each sample keeps in its cache.
    """

    key: int
    tokens: int
    samples: int = 1
    upper: int = 0
    prompt: int = 0

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
class WorkerCapacity:
    """Who can sample: ``slots`` completions at once, along its own ``curve``, within ``kv_tokens`` of cache.

    ``running``: expected tokens left of those it runs already; ``waiting``: of those that it was sent beyond its slots;
    ``contexts``: of both, in this order, the tokens that each has in the cache when it goes on or begins; empty: none.
    ``kv_tokens`` none: the cache holds whatever the slots do.
    """

    worker_id: str
    slots: int
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    curve: DecodeCurve = TYPICAL_CURVE
    kv_tokens: int | None = None
    contexts: tuple[int, ...] = ()

    @property
    def load(self) -> int:
        """Expected tokens of what it has."""
        return sum(self.running) + sum(self.waiting)


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One worker's part of a plan: its items in order, at most ``concurrency`` completions at once."""

    worker: WorkerCapacity
    concurrency: int
    items: tuple[Item, ...] = ()

    @property
    def is_reduced(self) -> bool:
        """Whether slots stay empty on purpose, so that long completions run fast."""
        return self.concurrency < self.worker.slots


@dataclass(frozen=True, slots=True)
class Plan:
    """A share for each worker, in the order of the workers."""

    shares: tuple[WorkerShare, ...]

    def checked(self, items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> "Plan":
        """The plan itself.

        Raises:
            LifecycleError: an item is in no share or in two, a worker is left out, or a concurrency is impossible.
        """
        # An item that is lost here would be a prompt that is never trained, and one that is in two shares is sent
        # twice.
        planned = sorted(item.key for share in self.shares for item in share.items)
        if planned != sorted(item.key for item in items):
            raise LifecycleError(f"expected each of {len(items)} items in one share, got {len(planned)} in all shares")
        if [share.worker.worker_id for share in self.shares] != [worker.worker_id for worker in workers]:
            raise LifecycleError("expected one share for each worker, in the order of the workers")
        if wrong := [
            share.concurrency for share in self.shares if not 1 <= share.concurrency <= max(1, share.worker.slots)
        ]:
            raise LifecycleError(f"expected a concurrency from 1 to the worker's slots, got {wrong[0]}")
        return self


Strategy = Callable[[Sequence[Item], Sequence[WorkerCapacity]], Plan]
"""Items in the order in which they would be sent, and all workers that may take some."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objective:
    """What plans are compared by: seconds until the trainer is through with all that was planned.

    A trainer that takes a group as soon as its last sample is there, ``train_s_per_token`` for each token of it, and is
    free ``trainer_free_s`` from now, is through at

        max(trainer_free_s + Σ work, max over groups g of end(g) + Σ work of the groups that end no earlier than g)

    so it counts how soon it gets enough to do, and how much is left to be trained behind the last completion; the
    makespan alone does not tell. With ``train_s_per_token`` 0 this is the makespan, which is what counts where training
    begins when everything is there. A time before ``slack_s`` is worth nothing.

    Among plans that are alike in this the one whose last completion ends sooner is better, by ``TIE`` of that time.
    """

    train_s_per_token: float = 0.0
    trainer_free_s: float = 0.0
    slack_s: float = 0.0

    def seconds(self, ends: Floats, tokens: Floats) -> float:
        """``ends``: seconds until each group is whole, [N]; ``tokens``: to be trained of each, [N]."""
        if not len(ends):
            return 0.0
        if not self.train_s_per_token:
            return float(ends.max())
        order = np.argsort(ends)
        # Work of each group and of all that end after it, in the order of their ends.
        work = np.cumsum(self.train_s_per_token * tokens[order][::-1])[::-1]
        return float(max(self.trainer_free_s + work[0], (ends[order] + work).max()) + TIE * ends.max())


MAKESPAN = Objective()


def planned_ends(plan: Plan, lengths_of: Callable[[Item], Sequence[int]]) -> tuple[Floats, Floats]:
    """Seconds until each group is whole, and the tokens that it gives to train; completions under way count as groups.

    ``lengths_of``: tokens of each of an item's samples.
    """
    ends, tokens = [np.zeros(0)], [np.zeros(0)]
    for share in plan.shares:
        worker, items = share.worker, share.items
        lengths = [lengths_of(item) for item in items]
        begun = len(worker.running) + len(worker.waiting)
        contexts = [*(worker.contexts or (0,) * begun), *(item.prompt for item in items for _ in range(item.samples))]
        flat = [*worker.waiting, *chain.from_iterable(lengths)]
        ended = completion_ends(flat, share.concurrency, worker.curve, worker.running, contexts, worker.kv_tokens)
        trained = np.array(contexts, np.float64)
        trained += (*worker.running, *flat)
        # Of a group the last of its samples, which stand behind one another; what is under way stands before all.
        firsts = [*range(begun), *accumulate((len(each) for each in lengths[:-1]), initial=begun)]
        if firsts := firsts[: begun + len(items)]:
            ends.append(np.maximum.reduceat(ended, firsts))
            tokens.append(np.add.reduceat(trained, firsts))
    return np.concatenate(ends), np.concatenate(tokens)


def predicted_s(plan: Plan, objective: Objective = MAKESPAN) -> float:
    """What the plan comes to if every length is as expected; by default the seconds until the last share is empty."""
    # Of a single sample without the property, which plans of thousands of items feel.
    return objective.seconds(*planned_ends(plan, lambda item: (item.tokens,) if item.samples == 1 else item.lengths))


def completion_ends(
    lengths: Sequence[int],
    concurrency: int,
    curve: DecodeCurve,
    running: Sequence[int] = (),
    contexts: Sequence[int] = (),
    kv_tokens: int | None = None,
) -> Floats:
    """Seconds until each completion ends: those that run, then these, which begin in this order, so many at once.

    ``running``: tokens left of the completions that run at the start, which may be more than ``concurrency``;
    ``contexts``: tokens in each one's cache when it begins or goes on, of ``running`` first; empty: none.
    """
    before = contexts or (0,) * (len(running) + len(lengths))
    if kv_tokens is None:
        starts, ends = _steps(lengths, concurrency, running)
    else:
        starts, ends = _steps_within_cache(lengths, concurrency, running, before, kv_tokens)
    if not ends:
        return np.zeros(0)
    by_end = np.argsort(ends, kind="stable")
    steps = np.array(ends, np.float64)[by_end]
    previous = np.concatenate([[0.0], steps[:-1]])
    # Completions begin when others end, so between two ends the batch stays: those begun, less those that have ended.
    batches = np.searchsorted(starts, previous, side="right") - np.arange(len(ends))
    step_s = np.array([0.0, *map(curve.batch_s, range(1, int(batches.max()) + 1))])
    seconds = np.cumsum((steps - previous) * step_s[batches])
    # Caches and prefills cost the same in any order; when they do is not followed: all ends are later by one share.
    if seconds[-1] and (extra := _extra_s((*running, *lengths), before, len(running), curve)):
        seconds *= 1 + extra / seconds[-1]
    found = np.empty(len(ends))
    found[by_end] = seconds
    return found


def _steps(lengths: Iterable[int], concurrency: int, running: Sequence[int]) -> tuple[list[int], list[int]]:
    """Decode steps at which each completion begins and ends, those that run first."""
    # heap: when those in the batch end, the first to end on top.
    starts, ends, heap, now = [0] * len(running), list(running), list(running), 0
    heapify(heap)
    for length in lengths:
        if len(heap) < max(1, concurrency):
            heappush(heap, now + length)
        else:
            # More may run than shall: nothing begins until enough have ended.
            while len(heap) > max(1, concurrency):
                heappop(heap)
            # The next one begins when the first ends, and ends as many steps later as it has tokens.
            now = heap[0]
            heapreplace(heap, now + length)
        starts.append(now)
        ends.append(now + length)
    return starts, ends


def _steps_within_cache(
    lengths: Iterable[int], concurrency: int, running: Sequence[int], contexts: Sequence[int], kv_tokens: int
) -> tuple[list[int], list[int]]:
    """The same where a completion begins only if all that run with it will fit into the cache; one always does."""
    starts, ends, now = [0] * len(running), list(running), 0
    batch = sorted((left, -context) for left, context in zip(running, contexts, strict=False))
    for length, context in zip(lengths, contexts[len(running) :], strict=True):
        while batch:
            entry = (now + length, now - context)
            if len(batch) < concurrency and fits_cache([*batch, entry], kv_tokens):
                break
            now = max(now, batch.pop(0)[0])
        insort(batch, (now + length, now - context))
        starts.append(now)
        ends.append(now + length)
    return starts, ends


def fits_cache(batch: Iterable[tuple[int, int]], kv_tokens: int) -> bool:
    """Whether the contexts of these completions never take more than so many tokens of cache.

    ``batch``: of each the decode step at which it ends, and the step at which its context would have been empty: at
    step s the two of a completion hold s - empty tokens, until it ends. The most are held just before one of them ends.
    """
    held, count = 0, 0
    for end, empty in sorted(batch, reverse=True):
        # Of those that end at this step or later: Σ (end - empty).
        count, held = count + 1, held + empty
        if count * end - held > kv_tokens:
            return False
    return True


def _extra_s(lengths: Sequence[int], contexts: Sequence[int], running: int, curve: DecodeCurve) -> float:
    """Seconds that these completions take beside t(b): tokens in their caches, and prefills of those yet to begin."""
    # Token k attends to what was there and to the k - 1 before it; over a completion that is L (L - 1) / 2 + p L.
    held = sum(length * ((length - 1) / 2 + before) for length, before in zip(lengths, contexts, strict=True))
    return curve.settings.context_s_per_token * held + sum(map(curve.prefill_s, contexts[running:]))


def log_deviation(item: Item) -> float:
    """Standard deviation of the logarithm of its length; none of a group, whose longest is planned at the upper."""
    return log_deviation_of(item.tokens, item.upper) if item.samples == 1 else 0.0


def log_deviation_of(median: int, upper: int) -> float:
    """Standard deviation s of the logarithm of a log-normal length with these quantiles of 50 and 90 %; 0 for none.

    The 90 % quantile is median × exp(1.28 s), so s = log(upper / median) / 1.28.
    """
    return math.log(upper / median) / _UPPER if upper > median else 0.0


def mean_excess(grown: float, deviation: float) -> float:
    """Tokens still to come, as a multiple of those that are there, of a completion of ``grown`` times its median.

    Of a log-normal length L of median 1 and log-deviation s, with Φ the standard normal distribution and
    d = log(grown) / s (Johnson, Kotz and Balakrishnan 1994, chapter 14):

        E[L | L > grown] / grown - 1 = exp(s² / 2) × (1 - Φ(d - s)) / (1 - Φ(d)) / grown - 1

    Half of what is there, the mean excess of a heavy tail, is the most, and holds where nothing is known of s or the
    estimate has turned out to be beyond belief.
    """
    deviations = math.log(grown) / deviation if deviation else math.inf
    if deviations > CREDIBLE:
        return STILL_TO_COME
    beyond = (1 - _NORMAL.cdf(deviations - deviation)) / (1 - _NORMAL.cdf(deviations))
    return min(STILL_TO_COME, math.exp(deviation * deviation / 2) * beyond / grown - 1)


def conservative(items: Sequence[Item]) -> list[Item]:
    """The same items, the longest of them at their upper estimates."""
    # The longest first; of those alike, by position, so that every process plans the same.
    tail = sorted(items, key=lambda item: (-item.tokens, item.key))[: math.ceil(TAIL_SHARE * len(items))]
    # Groups of several samples are left as they are: their longest is planned at the upper estimate anyway.
    raised = {item.key: replace(item, tokens=item.upper) for item in tail if log_deviation(item)}
    return [raised.get(item.key, item) for item in items]


def with_items(plan: Plan, items: Sequence[Item]) -> Plan:
    """The plan with these items in place of those that have the same keys."""
    given = {item.key: item for item in items}
    shares = (replace(share, items=tuple(given[item.key] for item in share.items)) for share in plan.shares)
    return Plan(tuple(shares))


class LengthDraws:
    """Draws of what the lengths may turn out to be, the same ones for every plan that is compared.

    A length of median m and log-deviation s is drawn as m × exp(s × z), z standard normal, and none is longer than the
    largest upper estimate, which is near the longest completion that is allowed. Where no length is uncertain, one
    draw, of the expected lengths, is exact.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._draws: list[dict[int, tuple[int, ...]]] = []
        limit = max((max(item.tokens, item.upper) for item in items), default=1)
        rng = random.Random(len(items))  # any fixed seed: plans are to be repeatable
        for _ in range(DRAWS if any(map(log_deviation, items)) else 1):
            self._draws.append({item.key: _drawn(item, rng, limit) for item in items})

    def mean_s(self, plan: Plan, objective: Objective = MAKESPAN) -> float:
        """Mean over the draws of what the plan comes to."""
        drawn = (planned_ends(plan, lambda item, lengths=lengths: lengths[item.key]) for lengths in self._draws)  # type: ignore[misc]
        return fmean(objective.seconds(*ends) for ends in drawn)


def _drawn(item: Item, rng: random.Random, limit: int) -> tuple[int, ...]:
    """A length for each sample; those of a group, whose longest is planned at its upper estimate, are as expected."""
    deviation = log_deviation(item)
    if not deviation:
        return item.lengths
    length = item.tokens * math.exp(deviation * rng.gauss(0, 1))
    return (max(1, min(limit, round(length))),)
