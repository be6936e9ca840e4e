"""What `make bench-ranks` finds, in short."""

from benchmarks.ranks import trained


def test_four_ranks_train_3_6_times_as_fast_and_uneven_arrivals_cost_a_tenth_at_most() -> None:
    even = {ranks: trained(ranks, uneven=False, steps=4) for ranks in (1, 4)}
    assert even[1].trainer_busy > 0.9
    assert even[4].trajectories_per_s >= 3.6 * even[1].trajectories_per_s
    assert trained(4, uneven=True, steps=4).trajectories_per_s >= 0.9 * even[4].trajectories_per_s
