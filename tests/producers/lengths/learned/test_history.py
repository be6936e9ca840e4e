import math
import random

import pytest

from streamrl.producers.lengths.learned.history import SETTLED, DatasetLevels, PromptHistory


def test_a_level_is_the_mean_logarithm_until_a_model_explains_lengths() -> None:
    levels = DatasetLevels()
    for length in (10, 1000):
        levels.add("a", length)
    assert levels.of("a") == pytest.approx(math.log(100))
    assert levels.of("never seen") == levels.of("a")
    assert (levels.count("a"), levels.count("never seen")) == (2, 0)


def test_lengths_that_the_model_explains_do_not_move_the_level() -> None:
    levels = DatasetLevels()
    for _ in range(2 * SETTLED):
        levels.add("a", 100, 0.0)
    before = levels.of("a")
    for _ in range(100):
        levels.add("a", 10_000, math.log(100))
    assert levels.of("a") == pytest.approx(before, abs=0.01)


def test_a_policy_that_doubles_is_followed_within_a_few_hundred_completions_by_all_data_sets() -> None:
    levels, rng = DatasetLevels(), random.Random(0)
    for _ in range(SETTLED + 1):
        for name in "abc":
            levels.add(name, 100, 0.0)
    for _ in range(400):
        levels.add(rng.choice("ab"), 200, 0.0)
    assert levels.of("a") == pytest.approx(math.log(200), abs=0.05)
    assert levels.of("c") > math.log(150)


def test_the_level_settles_at_the_median_however_long_the_longest_get() -> None:
    levels, rng = DatasetLevels(), random.Random(0)
    for _ in range(4000):
        levels.add("a", 10**9 if rng.random() < 0.3 else 100, 0.0)
    assert levels.of("a") == pytest.approx(math.log(100), abs=0.05)


def test_levels_survive_a_file() -> None:
    levels, again = DatasetLevels(), DatasetLevels()
    for index in range(3 * SETTLED):
        levels.add("ab"[index % 2], 50 + index % 7, 0.1)
    again.load(levels.dump())
    assert again.of("a") == pytest.approx(levels.of("a"))
    assert again.count("b") == levels.count("b")


def _carried(noise: float) -> PromptHistory:
    """Every prompt is seen ten times; its own distance from the model has a spread of one."""
    history, rng = PromptHistory(), random.Random(0)
    own = [rng.gauss(0, 1) for _ in range(200)]
    for _ in range(10):
        for index, distance in enumerate(own):
            history.add(str(index), distance + rng.gauss(0, noise), history.recall(str(index)))
    return history


def test_the_past_of_a_prompt_carries_over_as_far_as_lengths_repeat() -> None:
    for noise, low, high in ((0.01, 0.95, 1.0), (1.0, 0.8, 0.97), (30.0, 0.0, 0.3)):
        assert low <= _carried(noise).effect((9, 1.0)) <= high


def test_a_prompt_seen_once_says_less_than_one_seen_often() -> None:
    history = _carried(1.0)
    assert history.effect((1, 1.0)) < history.effect((9, 1.0)) - 0.1


def test_a_new_prompt_has_no_past() -> None:
    history = _carried(0.01)
    assert history.recall("new") == (0, 0.0)
    assert history.effect(history.recall("new")) == 0.0


def test_the_prompt_seen_longest_ago_is_forgotten_first() -> None:
    history = PromptHistory(limit=2)
    for name in "abac":
        history.add(name, 1.0, history.recall(name))
    assert len(history) == 2
    assert history.recall("b") == (0, 0.0)
    assert history.recall("a") == (2, 1.0)
