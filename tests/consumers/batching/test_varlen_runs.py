"""Micro-batches without padding: which samples, and how they are dealt."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.dealing import deal
from streamrl.consumers.batching.micro_batches import CostModel, MicroBatcher, SampleRange, fewest_runs, fullest_run
from streamrl.consumers.batching.settings import BatchingSettings
from tests.consumers.batching.test_packing import array
from tests.consumers.factories import training_sample

MODEL = CostModel(linear=1.0, quadratic=0.01, fixed=8.0)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(lambda found: sorted(found, reverse=True))
budgets = st.integers(1, 130)
ranks = st.integers(1, 4)


def fits(found: list[int], budget: int, ranks: int) -> bool:
    """Whether so many ranks can take a run, each neighbours within the budget or one sample."""
    return all(len(share) <= 1 or sum(found[row] for row in share) <= budget for share in deal(found, ranks, "varlen"))


@given(lengths, budgets, ranks)
def test_every_sample_is_in_one_of_the_fewest_runs_that_fit(found: list[int], budget: int, ranks: int) -> None:
    runs = fewest_runs(array(found), budget, ranks)
    assert [index for run in runs for index in range(run.start, run.end)] == list(range(len(found)))
    assert all(fits(found[run.start : run.end], max(budget, found[run.start]), ranks) for run in runs)
    # Greedy from the longest is the fewest of all cuts into neighbours: a run with one sample more does not fit.
    for run in runs[:-1]:
        assert not fits(found[run.start : run.end + 1], budget, ranks)


@given(lengths, budgets)
def test_the_best_run_is_the_costliest_that_fits(found: list[int], budget: int) -> None:
    def worth(run: SampleRange) -> float:
        return float(MODEL.of_sequences(array(found[run.start : run.end])).sum())

    run = fullest_run(array(found), budget, MODEL)
    all_runs = [SampleRange(*ends) for ends in itertools.combinations(range(len(found) + 1), 2)]
    assert worth(run) == pytest.approx(max(worth(each) for each in all_runs if fits(found[slice(*each)], budget, 1)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3))
def test_the_fullest_share_is_as_small_as_neighbours_allow(found: list[int], ranks: int) -> None:
    ordered = sorted(found, reverse=True)
    largest = max(sum(found[row] for row in share) for share in deal(found, ranks, "varlen"))
    cuts = itertools.combinations_with_replacement(range(len(found) + 1), ranks - 1)
    least = min(
        max(sum(ordered[start:end]) for start, end in itertools.pairwise([0, *cut, len(found)])) for cut in cuts
    )
    assert largest == least


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 120), st.booleans(), ranks)
def test_a_batcher_that_packs_counts_no_padding(found: list[int], budget: int, whole: bool, ranks: int) -> None:
    batcher = MicroBatcher(BatchingSettings(token_budget=budget), whole, ranks, "varlen", lookahead=1.5)
    batches = [
        batch for row, tokens in enumerate(found) for batch in batcher.hold([training_sample(row, tokens=tokens)])
    ]
    batches += batcher.flush()
    assert sorted(ref.offset for batch in batches for ref in batch.refs) == list(range(len(found)))
    for batch in batches:
        assert batch.num_positions == batch.num_tokens
        assert fits(batch.lengths.tolist(), max(budget, int(batch.lengths.max())), ranks)
        assert batch.repacked([0]).packing == "varlen"
