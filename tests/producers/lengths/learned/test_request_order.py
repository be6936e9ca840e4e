from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.lengths.learned.predictor import MAX_REQUESTED_GROUPS, RequestOrder


@dataclass(frozen=True)
class _One:
    group_id: str
    number: int = 1


def _take(turns: RequestOrder[_One], group_id: str, number: int = 1) -> list[_One]:
    return turns.take(group_id, _One(group_id, number))


@given(st.permutations(range(12)), st.integers(1, 3))
def test_completions_have_their_turn_in_the_order_in_which_they_were_asked_for(order: list[int], samples: int) -> None:
    turns = RequestOrder[_One](samples, most=1000)
    for number in range(12):
        turns.ask(f"g{number}")
    due = [each for number in order for _ in range(samples) for each in _take(turns, f"g{number}")]
    assert [each.group_id for each in due] == [f"g{number}" for number in range(12) for _ in range(samples)]
    assert "g0" not in turns


def test_unrequested_completions_are_released_at_once() -> None:
    turns = RequestOrder[_One](1, most=10)
    turns.ask("a")
    assert _take(turns, "b") == [_One("b")]
    assert _take(turns, "a") == [_One("a")]
    assert _take(turns, "a", 2) == [_One("a", 2)]


def test_a_stuck_group_delays_only_a_limited_number_of_others() -> None:
    turns = RequestOrder[_One](2, most=5)
    for name in ("lost", "a", "b", "c"):
        turns.ask(name)
    assert _take(turns, "lost") == []
    held = [_take(turns, name) for name in ("a", "a", "b", "b")]
    assert held == [[], [], [], []]
    assert [each.group_id for each in _take(turns, "c")] == ["lost", "a", "a", "b", "b"]
    assert _take(turns, "lost") == [_One("lost")]


def test_groups_that_were_asked_for_and_never_came_are_forgotten() -> None:
    turns = RequestOrder[_One](1, most=10)
    for number in range(MAX_REQUESTED_GROUPS + 2):
        turns.ask(f"g{number}")
    assert _take(turns, "g2") == [_One("g2")]
