"""What a plan is worth if lengths are not quite as expected. Pure.

An estimate's upper quantile says how far off it may be: log-normal around the median, the upper one at 90 %. A
completion that is underestimated starts late and ends last, which costs more than the room that an overestimated one
wastes. So the long tail may be planned at its upper estimates, and plans are compared over draws of what may come.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import NormalDist, fmean

from producers.dispatch.plans import Item, Plan, finish_s
from schemas.profiles import DecodeCurve

TAIL_SHARE = 0.2
DRAWS = 5
STILL_TO_COME = 0.5
CREDIBLE = 3.0
"""Deviations from the median up to which an estimate's own distribution is believed."""
_NORMAL = NormalDist()
_UPPER = _NORMAL.inv_cdf(0.9)


def deviation(item: Item) -> float:
    """Standard deviation of the logarithm of its length; none of a group, whose longest is planned at the upper."""
    return spread_of(item.tokens, item.upper) if item.samples == 1 else 0.0


def spread_of(median: int, upper: int) -> float:
    """Standard deviation of the logarithm of a log-normal length with these quantiles, of 50 and 90 %; 0 for none."""
    return math.log(upper / median) / _UPPER if upper > median else 0.0


def excess(grown: float, spread: float) -> float:
    """Tokens still to come, as a multiple of those that are there, of a completion of ``grown`` times its median.

    The mean of what exceeds that, of a log-normal length (Johnson, Kotz and Balakrishnan 1994, chapter 14). Half of
    what is there, the mean excess of a heavy tail, is the most, and holds where nothing is known of the spread or the
    estimate has turned out to be beyond belief.
    """
    deviations = math.log(grown) / spread if spread else math.inf
    if deviations > CREDIBLE:
        return STILL_TO_COME
    beyond = (1 - _NORMAL.cdf(deviations - spread)) / (1 - _NORMAL.cdf(deviations))
    return min(STILL_TO_COME, math.exp(spread * spread / 2) * beyond / grown - 1)


def cautious(items: Sequence[Item]) -> list[Item]:
    """The same items, the longest of them at their upper estimates."""
    tail = sorted(items, key=lambda item: (-item.tokens, item.key))[: math.ceil(TAIL_SHARE * len(items))]
    doubted = {item.key: replace(item, tokens=item.upper) for item in tail if deviation(item)}
    return [doubted.get(item.key, item) for item in items]


def as_given(plan: Plan, items: Sequence[Item]) -> Plan:
    """The plan with these items in place of those that have the same keys."""
    given = {item.key: item for item in items}
    lanes = (replace(lane, items=tuple(given[item.key] for item in lane.items)) for lane in plan.lanes)
    return Plan(tuple(lanes))


class Doubt:
    """Draws of what the lengths may turn out to be, the same ones for every plan that is compared.

    None is longer than the largest upper estimate, which is near the longest completion that is allowed.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        chance = random.Random(len(items))
        spread = {item.key: deviation(item) for item in items}
        limit = max((max(item.tokens, item.upper) for item in items), default=1)
        self._draws = [
            {
                item.key: (_drawn(item.tokens, spread[item.key] * chance.gauss(0, 1), limit),)
                if spread[item.key]
                else item.lengths
                for item in items
            }
            for _ in range(DRAWS if any(spread.values()) else 1)
        ]

    def finish_s(self, plan: Plan, curve: DecodeCurve) -> float:
        """Mean seconds until the last lane is empty."""
        return fmean(self._finish_s(plan, curve, lengths) for lengths in self._draws)

    @staticmethod
    def _finish_s(plan: Plan, curve: DecodeCurve, lengths: dict[int, tuple[int, ...]]) -> float:
        return max(
            (
                finish_s(
                    [*lane.worker.waiting, *chain.from_iterable(lengths[item.key] for item in lane.items)],
                    lane.concurrency,
                    curve,
                    lane.worker.running,
                )
                for lane in plan.lanes
            ),
            default=0.0,
        )


def _drawn(tokens: int, error: float, limit: int) -> int:
    return max(1, min(limit, round(tokens * math.exp(error))))
