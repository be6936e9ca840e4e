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

from producers.dispatch.planning.makespan import finish_s
from producers.dispatch.planning.plans import Item, Plan
from schemas.profiles.decode import DecodeCurve

TAIL_SHARE = 0.2
DRAWS = 5
_UPPER = NormalDist().inv_cdf(0.9)


def deviation(item: Item) -> float:
    """Standard deviation of the logarithm of its length; none of a group, whose longest is planned at the upper."""
    return math.log(item.upper / item.tokens) / _UPPER if item.samples == 1 and item.upper > item.tokens else 0.0


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
