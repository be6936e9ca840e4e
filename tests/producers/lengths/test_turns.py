from hypothesis import given
from hypothesis import strategies as st

from producers.lengths.completion import Completion
from producers.lengths.turns import MAX_ASKED, Turns
from schemas.messages.prompts import Prompt

PROMPT = Prompt(prompt_id="p", dataset="d", content="?")


def _one(group: str, length: int = 1) -> Completion:
    return Completion(PROMPT, group, length)


@given(st.permutations(range(12)), st.integers(1, 3))
def test_completions_have_their_turn_in_the_order_in_which_they_were_asked_for(order: list[int], samples: int) -> None:
    turns = Turns(samples, most=1000)
    for number in range(12):
        turns.ask(f"g{number}")
    due = [each for number in order for _ in range(samples) for each in turns.take(_one(f"g{number}"))]
    assert [each.group_id for each in due] == [f"g{number}" for number in range(12) for _ in range(samples)]
    assert "g0" not in turns


def test_what_was_not_asked_for_has_its_turn_at_once() -> None:
    turns = Turns(1, most=10)
    turns.ask("a")
    assert turns.take(_one("b")) == [_one("b")]
    assert turns.take(_one("a")) == [_one("a")]
    assert turns.take(_one("a", 2)) == [_one("a", 2)]


def test_a_group_that_never_ends_holds_others_up_only_so_long() -> None:
    turns = Turns(2, most=5)
    for name in ("lost", "a", "b", "c"):
        turns.ask(name)
    assert turns.take(_one("lost")) == []
    held = [turns.take(_one(name)) for name in ("a", "a", "b", "b")]
    assert held == [[], [], [], []]
    assert [each.group_id for each in turns.take(_one("c"))] == ["lost", "a", "a", "b", "b"]
    assert turns.take(_one("lost")) == [_one("lost")]


def test_groups_that_were_asked_for_and_never_came_are_forgotten() -> None:
    turns = Turns(1, most=10)
    for number in range(MAX_ASKED + 2):
        turns.ask(f"g{number}")
    assert turns.take(_one("g2")) == [_one("g2")]
