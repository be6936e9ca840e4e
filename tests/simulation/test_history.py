"""The judge of bus histories finds each kind of fault, and nothing in a sound history."""

from collections.abc import Sequence

import pytest

from tests.simulation.history import Acknowledged, BusHistory, Delivered, judge_bus

LOG = {("t", 0): {0: 10, 1: 11, 3: 13, 4: 14}}
"""Offset 2 is a gap: a marker, or a record of an aborted transaction."""


def acked(offset: int, content: int) -> BusHistory:
    return BusHistory(LOG, acknowledged=[Acknowledged("w", "t", 0, offset, content)])


def given(offsets: Sequence[int], first: int = 0) -> BusHistory:
    return BusHistory(LOG, delivered=[Delivered("r", "t", 0, offsets)], first={("t", 0): first})


@pytest.mark.parametrize(
    "history", [acked(1, 11), given([0, 1, 3, 4]), given([1, 3]), given([3, 4], first=3), given([]), given([0, 3], 3)]
)
def test_a_sound_history_has_no_problems(history: BusHistory) -> None:
    assert judge_bus(history) == []


@pytest.mark.parametrize(
    ("history", "rule"),
    [
        (acked(2, 12), "lost write"),
        (acked(5, 15), "lost write"),
        (acked(1, 99), "lost write"),
        (given([0, 1, 2, 3]), "aborted read"),
        (given([0, 3]), "internal skip"),
        (given([0, 1, 1, 3]), "non-monotonic poll"),
        (given([3, 1]), "non-monotonic poll"),
    ],
)
def test_a_broken_rule_is_named(history: BusHistory, rule: str) -> None:
    assert [problem.rule for problem in judge_bus(history)] == [rule]
