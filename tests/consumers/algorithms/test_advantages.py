import numpy as np
import pytest

from streamrl.consumers.algorithms.advantages import overlong_penalty
from streamrl.consumers.algorithms.estimators import deviation, group_advantages, leave_one_out_advantages


def test_advantages_are_centred_and_divided_by_the_sample_deviation() -> None:
    # mean 0.5, deviations ±0.5, sample variance 4 * 0.25 / 3 = 1/3
    advantages = group_advantages(np.array([1.0, 0.0, 1.0, 0.0]), scale=True)
    expected = 0.5 / (np.sqrt(1 / 3) + 1e-4)
    np.testing.assert_allclose(advantages, [expected, -expected, expected, -expected], rtol=1e-12)


def test_without_scaling_only_the_mean_is_taken_off() -> None:
    np.testing.assert_allclose(group_advantages(np.array([3.0, 0.0, 0.0]), scale=False), [2.0, -1.0, -1.0])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.3])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    rewards = np.full(7, reward)
    assert (group_advantages(rewards, scale=True) == 0.0).all()
    assert deviation(rewards) == 0.0


def test_a_single_reward_has_no_deviation_and_no_advantage() -> None:
    assert deviation(np.array([2.0])) == 0.0
    assert group_advantages(np.array([2.0]), scale=True).tolist() == [0.0]


def test_the_overlong_penalty_grows_linearly_over_the_cache_and_is_bounded() -> None:
    lengths = np.array([10, 80, 90, 100, 500])
    np.testing.assert_allclose(overlong_penalty(lengths, l_max=100, l_cache=20), [0.0, 0.0, -0.5, -1.0, -1.0])


def test_the_leave_one_out_baseline_is_the_mean_of_the_other_rewards() -> None:
    rewards = np.array([3.0, 0.0, 1.0, 4.0])
    expected = [reward - np.delete(rewards, index).mean() for index, reward in enumerate(rewards)]
    np.testing.assert_allclose(leave_one_out_advantages(rewards), expected, rtol=1e-12)
    np.testing.assert_allclose(leave_one_out_advantages(rewards), 4 / 3 * group_advantages(rewards, scale=False))


@pytest.mark.parametrize("rewards", [[], [2.0], [0.1, 0.1, 0.1]])
def test_without_other_rewards_to_compare_with_leave_one_out_gives_zeros(rewards: list[float]) -> None:
    assert leave_one_out_advantages(np.array(rewards)).tolist() == [0.0] * len(rewards)
