"""Plans: which worker samples which groups, how long that takes, and how good a plan is under uncertain lengths. Pure.

Lengths are in tokens. Times are in seconds by each worker's decode curve: t(b) is a decode step of b completions.

While its queue is not empty a worker runs at its concurrency, so its steps take equally long. Then its batch shrinks
and the steps become shorter. The time that attention to cached tokens adds does not depend on the schedule: a
completion of L tokens after a prompt of p adds ``context_s_per_token`` × (L (L - 1) / 2 + p L) seconds, whenever it
runs.

A worker's key-value cache limits its batch as its slots do (StreamRL, arXiv 2504.15930, equation 2, where the cache
caps the batch size). A completion starts only if, at the expected lengths, the contexts of all running completions fit
into ``kv_tokens`` until they end. An engine that is given more evicts its newest completion and computes it again.

Plans are compared by the time when the trainer will have finished their groups (``Objective``). This is not always when
the last completion ends.

An estimate's upper quantile shows how uncertain it is: lengths are log-normal around the median, and the upper quantile
is that of 90 %. A completion that is underestimated starts late and ends last, which costs more than the capacity that
an overestimated one wastes. So the long tail may be planned at its upper estimates, and plans are compared over random
draws of the lengths.
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
from streamrl.schemas.profiles import DEFAULT_CURVE, DecodeCurve

TAIL_SHARE = 0.2
"""Share of the items, the longest, that a conservative plan takes at their upper estimates: the long tail of StreamRL
(arXiv 2504.15930, section 4)."""
DRAWS = 5
"""Draws of the lengths over which plans are compared; few, because every plan is evaluated over each."""
MAKESPAN_WEIGHT = 1e-3
"""Weight of the makespan next to the trainer's end: small, but larger than rounding errors."""
HEAVY_TAIL_EXCESS = 0.5
"""Mean excess of a heavy tail, as a share of the tokens so far. It holds at any L if the survival falls as L^-3."""
CREDIBLE_DEVIATIONS = 3.0
"""Deviations from the median up to which an estimate's distribution is trusted."""
_NORMAL = NormalDist()
_UPPER = _NORMAL.inv_cdf(0.9)
"""Deviations from the median to the upper estimate: 1.28."""


@dataclass(frozen=True, slots=True)
class Item:
    """One group to be sampled on one worker. ``samples``: their number; ``tokens``: the expected length of most.

    ``upper``: a length that nearly all samples stay below; the longest of several samples is expected to reach it.
    ``prompt``: tokens of the prompt, which each sample keeps in the cache.
    """

    key: int
    tokens: int
    samples: int = 1
    upper: int = 0
    prompt: int = 0

    @property
    def load(self) -> int:
        """Expected tokens of all samples."""
        return self.tokens * (self.samples - 1) + self.longest

    @property
    def longest(self) -> int:
        """Expected tokens of the longest sample."""
        return self.tokens if self.samples == 1 else max(self.tokens, self.upper)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Expected tokens of each sample, the longest first."""
        return (self.longest, *(self.tokens,) * (self.samples - 1))


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """A worker that can sample ``slots`` completions at once, with its decode ``curve`` and ``kv_tokens`` of cache.

    ``running``: expected tokens left of each running completion; ``waiting``: of each that waits for a slot;
    ``contexts``: tokens of each of both, in this order, in the cache when it runs on or starts; empty: none.
    ``kv_tokens`` None: the cache does not limit the batch.
    """

    worker_id: str
    slots: int
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    curve: DecodeCurve = DEFAULT_CURVE
    kv_tokens: int | None = None
    contexts: tuple[int, ...] = ()

    @property
    def load(self) -> int:
        """Expected tokens left of the worker's completions."""
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
        # A prompt whose item is lost here is never trained, and one whose item is in two shares is sent twice.
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
"""Makes a plan from the items, in the order of their prompts, and all workers that may take some."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objective:
    """The figure by which plans are compared: seconds until the trainer has finished everything that was planned.

    The trainer takes a group as soon as its last sample arrives, needs ``train_s_per_token`` for each of its tokens,
    and is free ``trainer_free_s`` from now. It has finished at

        max(trainer_free_s + Σ work, max over groups g of end(g) + Σ work of the groups that end no earlier than g)

    So it matters how soon the trainer gets enough work, and how much work is left after the last completion; the
    makespan alone does not show this. With ``train_s_per_token`` 0 the figure is the makespan, which is right if
    training starts when all samples have arrived. Finishing before ``slack_s`` gains nothing.

    Among equal plans the one whose last completion ends sooner is better, by ``MAKESPAN_WEIGHT`` × that time.
    """

    train_s_per_token: float = 0.0
    trainer_free_s: float = 0.0
    slack_s: float = 0.0

    def seconds(self, ends: Floats, tokens: Floats) -> float:
        """The figure. ``ends``: seconds until each group is complete, [N]; ``tokens``: to train of each group, [N]."""
        if not len(ends):
            return 0.0
        if not self.train_s_per_token:
            return float(ends.max())
        order = np.argsort(ends)
        # Work of each group and all groups that end after it, in the order of their ends.
        work = np.cumsum(self.train_s_per_token * tokens[order][::-1])[::-1]
        return float(max(self.trainer_free_s + work[0], (ends[order] + work).max()) + MAKESPAN_WEIGHT * ends.max())


MAKESPAN = Objective()


def planned_ends(plan: Plan, lengths_of: Callable[[Item], Sequence[int]]) -> tuple[Floats, Floats]:
    """Seconds until each group is complete, and its tokens to train. Each completion in progress counts as a group.

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
        # A group ends with its last sample. Its samples are adjacent; completions in progress come before all groups.
        firsts = [*range(begun), *accumulate((len(each) for each in lengths[:-1]), initial=begun)]
        if firsts := firsts[: begun + len(items)]:
            ends.append(np.maximum.reduceat(ended, firsts))
            tokens.append(np.add.reduceat(trained, firsts))
    return np.concatenate(ends), np.concatenate(tokens)


def predicted_s(plan: Plan, objective: Objective = MAKESPAN) -> float:
    """The objective of the plan if every length is as expected; by default seconds until the last completion ends."""
    # For a single sample the property is avoided: in plans of thousands of items its cost is noticeable.
    return objective.seconds(*planned_ends(plan, lambda item: (item.tokens,) if item.samples == 1 else item.lengths))


def completion_ends(
    lengths: Sequence[int],
    concurrency: int,
    curve: DecodeCurve,
    running: Sequence[int] = (),
    contexts: Sequence[int] = (),
    kv_tokens: int | None = None,
) -> Floats:
    """Seconds until each completion ends: first the running ones, then those of ``lengths``, which start in this order.

    ``concurrency``: most completions at once; ``running``: tokens left of the completions that run at the start, which
    may be more than ``concurrency``; ``contexts``: tokens of each in the cache when it runs on or starts, ``running``
    first; empty: none.
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
    # Completions start when others end, so between two ends the batch is constant: those started less those ended.
    batches = np.searchsorted(starts, previous, side="right") - np.arange(len(ends))
    step_s = np.array([0.0, *map(curve.batch_s, range(1, int(batches.max()) + 1))])
    seconds = np.cumsum((steps - previous) * step_s[batches])
    # Caches and prefills cost the same in any order. Their times are not simulated: all ends are delayed by one factor.
    if seconds[-1] and (extra := _cache_and_prefill_s((*running, *lengths), before, len(running), curve)):
        seconds *= 1 + extra / seconds[-1]
    found = np.empty(len(ends))
    found[by_end] = seconds
    return found


def _steps(lengths: Iterable[int], concurrency: int, running: Sequence[int]) -> tuple[list[int], list[int]]:
    """Decode steps at which each completion starts and ends, the running ones first."""
    # heap: steps at which the completions in the batch end, the earliest on top.
    starts, ends, heap, now = [0] * len(running), list(running), list(running), 0
    heapify(heap)
    for length in lengths:
        if len(heap) < max(1, concurrency):
            heappush(heap, now + length)
        else:
            # If more run than allowed, nothing starts until enough have ended.
            while len(heap) > max(1, concurrency):
                heappop(heap)
            # The next completion starts when the first one ends, and takes one step per token.
            now = heap[0]
            heapreplace(heap, now + length)
        starts.append(now)
        ends.append(now + length)
    return starts, ends


def _steps_within_cache(
    lengths: Iterable[int], concurrency: int, running: Sequence[int], contexts: Sequence[int], kv_tokens: int
) -> tuple[list[int], list[int]]:
    """As ``_steps``, but a completion starts only if it fits into the cache with the running ones, or runs alone."""
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
    """Whether the contexts of these completions never take more than ``kv_tokens`` tokens of cache.

    ``batch``: for each completion, the decode step at which it ends, and the step at which its context would have been
    empty. At step s, until it ends, its prompt and completion hold s - empty tokens. The total peaks just before a
    completion ends.
    """
    held, count = 0, 0
    for end, empty in sorted(batch, reverse=True):
        # Over the completions that end at this step or later: Σ (end - empty).
        count, held = count + 1, held + empty
        if count * end - held > kv_tokens:
            return False
    return True


def _cache_and_prefill_s(lengths: Sequence[int], contexts: Sequence[int], running: int, curve: DecodeCurve) -> float:
    """Seconds in addition to t(b): attention to cached tokens, and prefills of completions that have not started."""
    # Token k attends to the p tokens there before and to the k - 1 tokens before it: in sum L (L - 1) / 2 + p L.
    held = sum(length * ((length - 1) / 2 + before) for length, before in zip(lengths, contexts, strict=True))
    return curve.settings.context_s_per_token * held + sum(map(curve.prefill_s, contexts[running:]))


def log_deviation(item: Item) -> float:
    """Standard deviation of the logarithm of an item's length; 0 for several samples, as ``upper`` covers these."""
    return log_deviation_of(item.tokens, item.upper) if item.samples == 1 else 0.0


def log_deviation_of(median: int, upper: int) -> float:
    """Standard deviation s of the logarithm of a log-normal length with these 50 % and 90 % quantiles, or 0.

    The 90 % quantile is median × exp(1.28 s), so s = log(upper / median) / 1.28.
    """
    return math.log(upper / median) / _UPPER if upper > median else 0.0


def mean_excess(grown: float, deviation: float) -> float:
    """Expected tokens left of a completion that has reached ``grown`` × its median, as a share of its tokens so far.

    For a log-normal length L of median 1 and log-deviation s, with Φ the standard normal distribution and
    d = log(grown) / s (Johnson, Kotz and Balakrishnan 1994, chapter 14):

        E[L | L > grown] / grown - 1 = exp(s² / 2) × (1 - Φ(d - s)) / (1 - Φ(d)) / grown - 1

    The result is at most ``HEAVY_TAIL_EXCESS``, the mean excess of a heavy tail. That is also the result if s is
    unknown, or if the completion is so long that the estimate is not credible.
    """
    deviations = math.log(grown) / deviation if deviation else math.inf
    if deviations > CREDIBLE_DEVIATIONS:
        return HEAVY_TAIL_EXCESS
    beyond = (1 - _NORMAL.cdf(deviations - deviation)) / (1 - _NORMAL.cdf(deviations))
    return min(HEAVY_TAIL_EXCESS, math.exp(deviation * deviation / 2) * beyond / grown - 1)


def conservative(items: Sequence[Item]) -> list[Item]:
    """The items, with the longest ``TAIL_SHARE`` of them at their upper estimates."""
    # Equal lengths are ordered by position, so that every process makes the same plan.
    tail = sorted(items, key=lambda item: (-item.tokens, item.key))[: math.ceil(TAIL_SHARE * len(items))]
    # Groups of several samples are not changed: their longest is planned at the upper estimate anyway.
    raised = {item.key: replace(item, tokens=item.upper) for item in tail if log_deviation(item)}
    return [raised.get(item.key, item) for item in items]


def with_items(plan: Plan, items: Sequence[Item]) -> Plan:
    """The plan with its items replaced by those of the same keys."""
    given = {item.key: item for item in items}
    shares = (replace(share, items=tuple(given[item.key] for item in share.items)) for share in plan.shares)
    return Plan(tuple(shares))


class LengthDraws:
    """Random draws of the lengths, the same for every plan that is compared.

    A length of median m and log-deviation s is drawn as m × exp(s × z), z standard normal. No length exceeds the
    largest upper estimate, which is near the longest allowed completion. If no length is uncertain, one draw of the
    expected lengths is exact.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._draws: list[dict[int, tuple[int, ...]]] = []
        limit = max((max(item.tokens, item.upper) for item in items), default=1)
        rng = random.Random(len(items))  # a fixed seed, so that plans are repeatable
        for _ in range(DRAWS if any(map(log_deviation, items)) else 1):
            self._draws.append({item.key: _drawn(item, rng, limit) for item in items})

    def mean_s(self, plan: Plan, objective: Objective = MAKESPAN) -> float:
        """Mean objective of the plan over the draws."""
        drawn = (planned_ends(plan, lambda item, lengths=lengths: lengths[item.key]) for lengths in self._draws)  # type: ignore[misc]
        return fmean(objective.seconds(*ends) for ends in drawn)


def _drawn(item: Item, rng: random.Random, limit: int) -> tuple[int, ...]:
    """A length for each sample; of a group of several samples the expected ones, as ``upper`` covers the longest."""
    deviation = log_deviation(item)
    if not deviation:
        return item.lengths
    length = item.tokens * math.exp(deviation * rng.gauss(0, 1))
    return (max(1, min(limit, round(length))),)
