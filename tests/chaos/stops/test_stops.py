"""A few moments of each edge that ends quickly; `make chaos` ends all of them at two hundred."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.chaos.stops.campaign import ends_of
from tests.chaos.stops.moment import Moment

pytestmark = pytest.mark.processes

MOMENTS = {
    "gateway": 4,
    "relay of the store": 3,
    "relay of copies": 3,
    "worker": 2,
    "coordinator": 2,
    "dispatcher": 2,
    "evaluator": 3,
    "page": 2,
    "export": 2,
}


def test_roles_that_are_ended_at_any_moment_leave_nothing_and_lose_nothing() -> None:
    def ends(role: str) -> list[Moment]:
        return list(ends_of(role, 1, MOMENTS[role]))

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(MOMENTS, pool.map(ends, MOMENTS), strict=True))
    assert {role: len(moments) for role, moments in found.items()} == MOMENTS
    assert not [
        f"{role}: {one.told}: {one.problems}" for role, moments in found.items() for one in moments if one.problems
    ]
