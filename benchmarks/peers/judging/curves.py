"""Learning curves: held-out reward over wall-clock, and when a curve reaches a reward. Pure.

Invariant the_target_is_reached_by_every_contender: it lies below the best reward of each.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

SHARE_OF_GAIN = 0.9
"""The target lies at this share of the way from the first policy to the lowest of the contenders' best rewards."""


@dataclass(frozen=True)
class Point:
    """Held-out reward of the weights after a step, and the seconds from the contender's start until they existed."""

    step: int
    seconds: float
    reward: float


Curve = Sequence[Point]
"""In order of time; the first point is the common policy at second 0."""


def seconds_to(curve: Curve, reward: float) -> float | None:
    """When the curve first reaches a reward, straight lines between its points; none if it never does."""
    if curve and curve[0].reward >= reward:
        return curve[0].seconds
    for before, after in itertools.pairwise(curve):
        if after.reward >= reward:
            share = (reward - before.reward) / (after.reward - before.reward)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def steps_to(curve: Curve, reward: float) -> float | None:
    """The same in optimizer steps."""
    return seconds_to([Point(point.step, float(point.step), point.reward) for point in curve], reward)


def smoothed(curve: Curve) -> list[Point]:
    """Each reward the mean of itself and its neighbours, but for the first: one evaluation is noisy."""
    middle = [
        Point(point.step, point.seconds, sum(near.reward for near in around) / len(around))
        for index, point in enumerate(curve)
        if index
        for around in [curve[max(index - 1, 1) : index + 2]]
    ]
    return [*curve[:1], *middle]


def common_target(curves: Sequence[Curve], share: float = SHARE_OF_GAIN) -> float:
    """The reward at a share of the gain that every curve reaches."""
    start = max(curve[0].reward for curve in curves)
    reached = min(max(point.reward for point in curve) for curve in curves)
    return start + share * (reached - start)


def ratio(mine: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Geometric mean over seeds of my time / their time; none if one of them is missing."""
    pairs = [(one, other) for one, other in zip(mine, theirs, strict=True) if one and other]
    return geometric_mean(one / other for one, other in pairs) if len(pairs) == len(mine) and pairs else None
