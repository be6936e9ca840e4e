import random

import pytest

from streamrl.planning.planner import composed, one_site, token_budget, two_sites
from streamrl.schemas.profiles import TrainingCosts


def overlapped(generate_s: float, train_s: float) -> float:
    return max(generate_s, train_s)


@pytest.mark.parametrize("seed", range(30))
def test_no_split_within_the_budget_is_faster(seed: int) -> None:
    chance = random.Random(seed)
    generation, training, tail = chance.uniform(10, 500), chance.uniform(10, 500), chance.uniform(0, 50)
    budget = chance.randint(2, 20)

    def generate_s(workers: int) -> float:
        return max(tail, generation / workers)

    def train_s(trainers: int) -> float:
        return 1.0 + training / trainers

    (best,) = one_site(budget, generate_s, train_s, overlapped)
    every = [(max(generate_s(x), train_s(y)), x + y) for x in range(1, budget) for y in range(1, budget - x + 1)]
    assert (best.step_s, best.workers + best.trainers) == min(every)
    assert best.workers + best.trainers <= budget


def test_candidates_come_fastest_first() -> None:
    found = one_site(8, lambda x: 60 / x, lambda y: 30 / y, overlapped, candidates=3)
    assert [split.step_s for split in found] == sorted(split.step_s for split in found)
    assert len(found) == 3
    assert (found[0].workers, found[0].trainers) == (5, 3)


def test_the_faster_stage_of_two_sites_leaves_devices_unused() -> None:
    split = two_sites(32, 16, lambda x: 640 / x, lambda y: 640 / y, overlapped)
    assert (split.workers, split.trainers) == (16, 16)
    split = two_sites(8, 16, lambda x: 640 / x, lambda y: 640 / y, overlapped)
    assert (split.workers, split.trainers) == (8, 8)


def test_only_asynchronous_modes_hide_the_shorter_stage_and_the_hand_over() -> None:
    assert composed("synchronous", 5.0)(100.0, 60.0) == 165.0
    assert composed("stream", 5.0)(100.0, 60.0) == 105.0
    assert composed("one_step_async", 5.0)(100.0, 60.0) == 100.0
    assert composed("trajectory_async", 150.0)(100.0, 60.0) == 150.0


def test_a_budget_hides_what_launching_a_micro_batch_costs() -> None:
    costs = TrainingCosts(forward_backward_s_per_token=1e-5, forward_backward_s_per_micro_batch=1e-3)
    budget = token_budget(costs, longest=1000, configured=16_384)
    assert budget == 8192
    assert 1e-3 / (1e-3 + budget * 1e-5) <= 0.02
    assert token_budget(costs, longest=20_000, configured=16_384) == 32_768
    assert token_budget(TrainingCosts(), longest=1000, configured=5000) == 5000
