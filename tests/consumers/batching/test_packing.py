import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.micro_batches import CostModel, Lengths, SampleRange, best_run, cheapest_runs

MODEL = CostModel(linear=1.0, quadratic=0.01, fixed=8.0)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(lambda found: sorted(found, reverse=True))
budgets = st.integers(1, 130)


def array(found: list[int]) -> Lengths:
    return np.array(found, dtype=np.int64)


def is_within(run: SampleRange, found: list[int], budget: int) -> bool:
    rows = run.end - run.start
    return rows == 1 or rows * found[run.start] <= budget


def cost(rows: int, width: int) -> float:
    """What the model says of a micro-batch in which padding costs as much as tokens."""
    return MODEL.fixed + rows * (MODEL.linear * width + MODEL.quadratic * width * width)


def useful_share(run: SampleRange, found: list[int]) -> float:
    useful = MODEL.of_sequences(array(found[run.start : run.end])).sum()
    return float(useful) / cost(run.end - run.start, found[run.start])


def total_cost(runs: list[SampleRange], found: list[int]) -> float:
    return sum(cost(run.end - run.start, found[run.start]) for run in runs)


@given(lengths, budgets)
def test_the_best_run_is_the_one_of_all_runs_with_the_largest_useful_share(found: list[int], budget: int) -> None:
    run = best_run(array(found), budget, MODEL)
    assert is_within(run, found, budget)
    all_runs = [SampleRange(*ends) for ends in itertools.combinations(range(len(found) + 1), 2)]
    best = max(useful_share(each, found) for each in all_runs if is_within(each, found, budget))
    assert useful_share(run, found) == pytest.approx(best)


@given(lengths, budgets)
def test_the_cheapest_runs_hold_each_sample_once_within_the_budget(found: list[int], budget: int) -> None:
    runs = cheapest_runs(array(found), budget, MODEL)
    assert [index for run in runs for index in range(run.start, run.end)] == list(range(len(found)))
    assert all(is_within(run, found, budget) for run in runs)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7).map(lambda found: sorted(found, reverse=True)), budgets)
def test_no_other_cut_into_neighbours_is_cheaper(found: list[int], budget: int) -> None:
    least = float("inf")
    for places in itertools.product((False, True), repeat=len(found) - 1):
        ends = [place + 1 for place, is_cut in enumerate(places) if is_cut] + [len(found)]
        runs = [SampleRange(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if all(is_within(run, found, budget) for run in runs):
            least = min(least, total_cost(runs, found))
    assert total_cost(cheapest_runs(array(found), budget, MODEL), found) == pytest.approx(least)


def test_without_samples_there_are_no_runs() -> None:
    assert cheapest_runs(array([]), 10, MODEL) == []


def test_a_long_sample_is_not_padded_with_short_ones() -> None:
    assert best_run(array([60, 5, 5, 5, 5, 5, 5, 5]), 120, MODEL) == SampleRange(0, 1)
