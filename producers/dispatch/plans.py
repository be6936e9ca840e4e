"""Plans: which worker samples which groups, how long that takes, and what it is worth if lengths are uncertain. Pure.

Lengths in tokens, times in seconds by the decode curve: t(b) is a decode step of a batch of b completions.

While its queue is not empty a worker runs at its concurrency, so that steps take equally long; then its batch shrinks
and the steps become shorter. What a step takes longer for the tokens in its caches does not depend on the schedule: a
completion of L tokens adds ``context_s_per_token`` × L (L - 1) / 2, whenever it runs.

An estimate's upper quantile says how far off it may be: log-normal around the median, the upper one at 90 %. A
completion that is underestimated starts late and ends last, which costs more than the room that an overestimated one
wastes. So the long tail may be planned at its upper estimates, and plans are compared over draws of what may come.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from statistics import NormalDist, fmean

from schemas.errors import LifecycleError
from schemas.profiles import DecodeCurve

TAIL_SHARE = 0.2
"""Of all items, the longest that a conservative plan takes at their upper estimates: the paper's long tail (StreamRL,
arXiv 2504.15930, section 4)."""
DRAWS = 5
"""Over which plans are compared: few, since every plan is evaluated over each of them."""
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
class WorkerCapacity:
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


Strategy = Callable[[Sequence[Item], Sequence[WorkerCapacity], DecodeCurve], Plan]
"""Items in the order in which they would be sent, all workers that may take some, and how fast they decode."""


def predicted_finish_s(plan: Plan, curve: DecodeCurve) -> float:
    """Seconds until the last share is empty."""
    return max((_share_finish_s(share, curve) for share in plan.shares), default=0.0)


def _share_finish_s(share: WorkerShare, curve: DecodeCurve) -> float:
    """Seconds until a worker has sampled what it runs already and everything in its share."""
    lengths = [*share.worker.waiting, *chain.from_iterable(item.lengths for item in share.items)]
    return worker_finish_s(lengths, share.concurrency, curve, share.worker.running)


def worker_finish_s(lengths: Sequence[int], concurrency: int, curve: DecodeCurve, running: Sequence[int] = ()) -> float:
    """Seconds to sample completions of these lengths in this order, at most so many at once.

    ``running``: tokens left of the completions that run at the start, which may be more than that.
    """
    # batch: for each running completion the decode step at which it ends, the first to end on top.
    batch = [*running, *lengths[: max(0, concurrency - len(running))]]
    waiting = islice(lengths, len(batch) - len(running), None)
    heapify(batch)
    seconds, steps = _contexts_s(lengths, curve), 0
    # More run than shall: nothing begins until enough have ended.
    while len(batch) > max(1, concurrency):
        seconds, steps = _retire(batch, seconds, steps, curve)
    # Full: each that ends makes room for the next, and all steps take equally long.
    began, step_s = steps, curve.batch_s(len(batch))
    for length in waiting:
        # The next one begins at the step at which the first ends, and ends as many steps later as it has tokens.
        steps = batch[0]
        heapreplace(batch, steps + length)
    seconds += (steps - began) * step_s
    # Nothing waits any more: the batch shrinks.
    while batch:
        seconds, steps = _retire(batch, seconds, steps, curve)
    return seconds


def _retire(batch: list[int], seconds: float, steps: int, curve: DecodeCurve) -> tuple[float, int]:
    """Seconds and steps at which the next completion of the batch ends, with no other beginning."""
    # All steps until the first one ends are taken with the batch as it is.
    step_s, end = curve.batch_s(len(batch)), heappop(batch)
    return seconds + (end - steps) * step_s, end


def _contexts_s(lengths: Sequence[int], curve: DecodeCurve) -> float:
    # Token k attends to the k - 1 before it; over a completion that is L (L - 1) / 2.
    per_token = curve.settings.context_s_per_token
    return per_token * sum(length * (length - 1) / 2 for length in lengths) if per_token else 0.0


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

    def mean_finish_s(self, plan: Plan, curve: DecodeCurve) -> float:
        """Mean over the draws of the seconds until the last worker is done."""
        return fmean(self._finish_s(plan, curve, lengths) for lengths in self._draws)

    @staticmethod
    def _finish_s(plan: Plan, curve: DecodeCurve, lengths: Mapping[int, tuple[int, ...]]) -> float:
        """The plan's finish if the samples of each item, by key, have these lengths."""
        finishes = [0.0]
        for share in plan.shares:
            drawn = [*share.worker.waiting, *chain.from_iterable(lengths[item.key] for item in share.items)]
            finishes.append(worker_finish_s(drawn, share.concurrency, curve, share.worker.running))
        return max(finishes)


def _drawn(item: Item, rng: random.Random, limit: int) -> tuple[int, ...]:
    """A length for each sample; those of a group, whose longest is planned at its upper estimate, are as expected."""
    deviation = log_deviation(item)
    if not deviation:
        return item.lengths
    length = item.tokens * math.exp(deviation * rng.gauss(0, 1))
    return (max(1, min(limit, round(length))),)
