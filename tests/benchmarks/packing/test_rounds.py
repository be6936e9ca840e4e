from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.packing.rounds import Round, deal, split_to_multiple, waiting_share
from streamrl.consumers.batching.micro_batches import CostModel, cheapest_runs

costs = st.lists(st.floats(0, 1000), max_size=24)
ranks = st.integers(1, 5)


def dealt(rounds: list[Round]) -> list[int]:
    return [index for each in rounds for index in each if index is not None]


def waited_for(found: list[float], rounds: list[Round]) -> float:
    return sum(max(found[index] for index in each if index is not None) for each in rounds)


@given(costs, ranks)
def test_every_micro_batch_is_dealt_once_and_ranks_have_equally_many(found: list[float], count: int) -> None:
    rounds = deal(found, count)
    assert sorted(dealt(rounds)) == list(range(len(found)))
    assert all(len(each) == count for each in rounds)
    assert all(None not in each for each in rounds[:-1])


@given(costs, ranks)
def test_no_rank_does_much_more_than_another(found: list[float], count: int) -> None:
    rounds = deal(found, count)
    loads = [sum(found[each[rank] or 0] for each in rounds if each[rank] is not None) for rank in range(count)]
    assert max(loads) - min(loads) <= max(found, default=0.0) * (1 + 1e-9)


@given(st.lists(st.floats(0, 1000), min_size=4, max_size=6))
def test_a_round_waits_for_its_costliest(found: list[float]) -> None:
    least = min(
        sum(max(found[index] for index in order[first : first + 2]) for first in range(0, len(order), 2))
        for order in permutations(range(len(found)))
    )
    assert waited_for(found, deal(found, 2)) == pytest.approx(least)


def test_waiting_is_the_share_of_the_ranks_time_that_is_not_work() -> None:
    assert waiting_share([4.0, 1.0, 2.0], [(0, 1), (2, None)]) == pytest.approx(1 - 7 / 12)
    assert waiting_share([3.0, 3.0], [(0, 1)]) == 0.0
    assert waiting_share([], []) == 0.0


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 130), st.integers(1, 4))
def test_splitting_makes_whole_rounds_of_the_same_samples(lengths: list[int], budget: int, count: int) -> None:
    found = sorted(lengths, reverse=True)
    model = CostModel(linear=1.0, quadratic=0.01, fixed=8.0)
    runs = split_to_multiple(cheapest_runs(np.array(found, dtype=np.int64), budget, model), count)
    assert [index for run in runs for index in range(run.start, run.end)] == list(range(len(found)))
    assert all(run.end - run.start == 1 or (run.end - run.start) * found[run.start] <= budget for run in runs)
    assert len(runs) % count == 0 or len(runs) == len(found)
