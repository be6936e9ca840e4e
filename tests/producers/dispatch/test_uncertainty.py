"""Plans for lengths that are known with an error: the long tail at its upper estimates, and never below the others."""

import math
import random
from statistics import fmean

import pytest

from streamrl.producers.dispatch.plans import Item, LengthDraws, WorkerCapacity, conservative, predicted_s, with_items
from streamrl.producers.dispatch.strategies import STRATEGIES

WORKERS = [WorkerCapacity(f"w{number}", 32) for number in range(4)]
CAP = 10_000


def guessed(count: int, sigma: float, seed: int) -> tuple[list[Item], list[Item]]:
    """What a calibrated predictor says, and what comes."""
    rng = random.Random(seed)
    whole = math.log(10) / 2.326
    said = [min(CAP, round(1000 * math.exp(rng.gauss(0, math.sqrt(whole**2 - sigma**2))))) for _ in range(count)]
    came = [max(1, min(CAP, round(tokens * math.exp(sigma * rng.gauss(0, 1))))) for tokens in said]
    uppers = [min(CAP, round(tokens * math.exp(1.2816 * sigma))) for tokens in said]
    items = [Item(key, tokens, 1, upper) for key, (tokens, upper) in enumerate(zip(said, uppers, strict=True))]
    return items, [Item(key, tokens) for key, tokens in enumerate(came)]


def test_the_longest_fifth_is_planned_at_its_upper_estimates() -> None:
    items = [Item(key, 100 * (key + 1), 1, 200 * (key + 1)) for key in range(10)]
    assert [item.tokens for item in conservative(items)] == [100 * (key + 1) for key in range(8)] + [1800, 2000]


def test_without_uncertainty_there_is_one_draw_and_it_is_the_estimate() -> None:
    items = [Item(key, 50 * (key + 1), 1, 50 * (key + 1)) for key in range(40)]
    plan = STRATEGIES["lpt"](items, WORKERS)
    assert LengthDraws(items).mean_s(plan) == predicted_s(plan)


@pytest.mark.parametrize("sigma", [0.15, 0.25])
def test_reserved_workers_keep_most_of_their_gain_when_lengths_are_known_with_a_small_error(sigma: float) -> None:
    gains = []
    for seed in range(4):
        items, came = guessed(512, sigma, seed)
        finish = {
            name: predicted_s(with_items(STRATEGIES[name](items, WORKERS), came))
            for name in ("round_robin", "lpt", "skewness_aware")
        }
        gains.append((finish["round_robin"] / finish["skewness_aware"], finish["round_robin"] / finish["lpt"]))
    assert fmean(reserved for reserved, _ in gains) > fmean(longest_first for _, longest_first in gains)


@pytest.mark.parametrize("sigma", [0.5, 0.9])
def test_a_bad_ranker_costs_little_against_longest_first_and_nothing_against_round_robin(sigma: float) -> None:
    finishes: dict[str, list[float]] = {"round_robin": [], "lpt": [], "skewness_aware": []}
    for seed in range(4):
        items, came = guessed(512, sigma, seed)
        for name, times in finishes.items():
            times.append(predicted_s(with_items(STRATEGIES[name](items, WORKERS), came)))
    means = {name: fmean(times) for name, times in finishes.items()}
    assert means["skewness_aware"] <= means["round_robin"]
    assert means["skewness_aware"] <= 1.1 * means["lpt"]
