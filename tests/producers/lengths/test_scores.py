import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.lengths.calibration import kendall_tau, recall_of_longest

LENGTHS = st.lists(st.integers(1, 50), min_size=2, max_size=40)


def test_knowing_the_lengths_scores_one_and_the_reverse_order_minus_one() -> None:
    lengths = list(range(100))
    assert (recall_of_longest(lengths, lengths), kendall_tau(lengths, lengths)) == (1.0, 1.0)
    assert (recall_of_longest(lengths[::-1], lengths), kendall_tau(lengths[::-1], lengths)) == (0.0, -1.0)


def test_predicting_the_same_for_all_scores_what_chance_gives() -> None:
    lengths = list(range(100))
    assert recall_of_longest([7] * 100, lengths) == pytest.approx(0.2)
    assert kendall_tau([7] * 100, lengths) == 0.0


def test_any_of_the_lengths_that_tie_for_the_last_place_counts_as_right() -> None:
    assert recall_of_longest([9, 1, 1, 1, 1], [5, 5, 5, 5, 5]) == 1.0
    assert recall_of_longest([1, 9, 1, 1, 1], [5, 5, 1, 1, 1]) == 1.0
    assert recall_of_longest([1, 1, 9, 1, 1], [5, 5, 1, 1, 1]) == 0.0


def test_nothing_can_be_said_of_too_few() -> None:
    assert recall_of_longest([], []) is None
    assert kendall_tau([1], [1]) is None
    assert kendall_tau([1, 2], [3, 3]) is None


def test_tau_counts_pairs_as_its_definition_does() -> None:
    assert kendall_tau([1, 2, 3, 3], [1, 3, 2, 4]) == pytest.approx(3 / (5 * 6) ** 0.5)


@given(LENGTHS, st.integers(0, 2**32))
def test_scores_stay_in_range_and_do_not_depend_on_the_order_of_arrival(lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    guesses = [rng.randint(1, 5) for _ in lengths]
    pairs = list(zip(guesses, lengths, strict=True))
    rng.shuffle(pairs)
    recall, tau = recall_of_longest(guesses, lengths), kendall_tau(guesses, lengths)
    assert recall is not None
    assert 0 <= recall <= 1 + 1e-9
    assert tau is None or -1 - 1e-9 <= tau <= 1 + 1e-9
    shuffled = [guess for guess, _ in pairs], [length for _, length in pairs]
    assert recall_of_longest(*shuffled) == pytest.approx(recall)
    assert kendall_tau(*shuffled) == (tau if tau is None else pytest.approx(tau))


@given(LENGTHS)
def test_any_order_preserving_prediction_is_perfect(lengths: list[int]) -> None:
    guesses = [3 * length + 7 for length in lengths]
    assert recall_of_longest(guesses, lengths) == pytest.approx(1.0)
    assert kendall_tau(guesses, lengths) in (None, pytest.approx(1.0))
