import random

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.dispatch.state import PromptCursor


def test_positions_come_in_order() -> None:
    positions = PromptCursor(window=4)
    assert (positions.next(2), positions.next(9)) == ([0, 1], [2, 3, 4, 5])
    assert (positions.cursor, positions.upcoming(2)) == (6, [6, 7])


def test_unsent_prompts_of_a_window_come_first_after_a_restart() -> None:
    positions = PromptCursor(window=4)
    for position in (0, 1, 2, 3, 7, 5):
        positions.see(position)
    positions.find_unsent(["a"])
    assert (positions.unsent, positions.ordered) == ([4, 6], frozenset("a"))
    assert (positions.next(1), positions.next(4), positions.next(2)) == ([4], [6], [8, 9])


def test_orders_that_expired_long_ago_are_not_sent_again() -> None:
    positions = PromptCursor(window=3)
    for position in (99, 100, 101, 102):
        positions.see(position)
    positions.find_unsent([])
    assert positions.next(2) == [103, 104]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.lists(st.randoms(use_true_random=False), min_size=1, max_size=6), st.data())
def test_every_drawn_prompt_is_ordered_whenever_a_dispatcher_ends(
    window: int, dispatchers: list[random.Random], data: st.DataObject
) -> None:
    """Windows leave in any order; each dispatcher ends within one, and the topic is all that the next has."""
    topic: list[int] = []
    for rng in dispatchers:
        positions = PromptCursor(window)
        for position in topic:
            positions.see(position)
        positions.find_unsent([])
        for _ in range(data.draw(st.integers(0, 3))):
            drawn = positions.next(data.draw(st.integers(1, window)))
            rng.shuffle(drawn)
            topic += drawn
        drawn = positions.next(window)
        rng.shuffle(drawn)
        topic += drawn[: data.draw(st.integers(0, len(drawn)))]
    assert len(topic) == len(set(topic))
    last = PromptCursor(window)
    for position in topic:
        last.see(position)
    last.find_unsent([])
    while last.unsent:
        topic += last.next(window)
    assert sorted(topic) == list(range(len(topic)))
