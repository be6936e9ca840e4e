"""Rows of a micro-batch over ranks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.dealing import deal
from streamrl.consumers.batching.micro_batches import CostModel, SampleRange, best_run, cheapest_runs
from tests.consumers.batching.test_packing import array

lengths = st.lists(st.integers(1, 60), max_size=40)


def widest(found: list[int], share: list[int]) -> int:
    return max((found[row] for row in share), default=0) * len(share)


@given(lengths, st.integers(1, 6))
def test_every_row_is_dealt_once_and_each_share_is_a_run_of_neighbours(found: list[int], ranks: int) -> None:
    shares = deal(found, ranks)
    assert len(shares) == ranks
    assert sorted(row for share in shares for row in share) == list(range(len(found)))
    dealt = [found[row] for share in shares for row in share]
    assert dealt == sorted(found, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_the_fullest_share_is_as_small_as_can_be(found: list[int], ranks: int) -> None:
    """Of all ways to give rows to ranks, neighbours or not."""
    largest = max(widest(found, share) for share in deal(found, ranks))
    ways = product(range(ranks), repeat=len(found))
    given_out = ([[row for row, to in enumerate(way) if to == rank] for rank in range(ranks)] for way in ways)
    assert largest == min(max(widest(found, share) for share in shares) for shares in given_out)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6), st.integers(20, 200))
def test_no_share_is_above_the_budget_or_the_longest_row_of_the_run(found: list[int], ranks: int, budget: int) -> None:
    model = CostModel(0.8, 0.2 / budget, 3.0)
    ordered = sorted(found, reverse=True)
    runs = [best_run(array(ordered), budget, model, ranks), *cheapest_runs(array(ordered), budget, model, ranks)]
    assert sum(run.end - run.start for run in runs[1:]) == len(found)
    for run in runs:
        part = ordered[run.start : run.end]
        assert all(widest(part, share) <= max(budget, part[0]) for share in deal(part, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_is_of_as_many_rows_as_all_ranks_can_take(ranks: int) -> None:
    model = CostModel(1.0, 0.0, 1.0)
    assert best_run(np.full(100, 10), 30, model, ranks) == SampleRange(0, 3 * ranks)
    assert [run.end - run.start for run in cheapest_runs(np.full(6 * ranks, 10), 30, model, ranks)] == [3 * ranks] * 2
