import numpy as np
import pytest

from benchmarks.paired import Pair, paired_cost


def test_a_cost_is_found_under_noise_that_a_pair_shares() -> None:
    pace = np.random.default_rng(0).lognormal(0, 0.5, 200)
    cost = paired_cost([Pair(one, one * 1.02) for one in pace], seed=0)
    assert cost.typical == pytest.approx(0.02)
    assert cost.low == pytest.approx(0.02)
    assert cost.high == pytest.approx(0.02)


def test_the_interval_contains_the_cost_and_is_as_narrow_as_the_noise_allows() -> None:
    noise = np.random.default_rng(1).lognormal(0, 0.05, (200, 2))
    cost = paired_cost([Pair(one, other * 1.03) for one, other in noise], seed=0)
    assert cost.low < 0.03 < cost.high
    assert 0.01 < cost.high - cost.low < 0.03


def test_pairs_in_which_the_machine_did_something_else_do_not_count() -> None:
    pairs = [Pair(1, 1.01)] * 8 + [Pair(1, 5), Pair(3, 1)]
    assert paired_cost(pairs, seed=0).typical == pytest.approx(0.01)


def test_one_pair_says_nothing() -> None:
    with pytest.raises(ValueError, match="two pairs or more, got 1"):
        paired_cost([Pair(1, 1)], seed=0)
