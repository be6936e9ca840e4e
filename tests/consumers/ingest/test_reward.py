from streamrl.consumers.ingest.filters import weighted_reward
from tests.consumers.factories import trajectory


def test_rewards_are_weighted_and_missing_ones_left_out_of_the_sum() -> None:
    found = trajectory(rewards={"exact": 1.0, "format": 0.5, "style": None})
    assert weighted_reward(found, {"exact": 2.0, "style": 9.0}) == (2.5, None)


def test_a_trajectory_to_which_no_reward_applies_says_so() -> None:
    for rewards in ({}, {"exact": None}):
        reward, fault = weighted_reward(trajectory(rewards=rewards), {})
        assert reward == 0.0
        assert fault is not None
        assert fault.startswith("no reward applies")


def test_a_failed_reward_leaves_no_sum_of_the_others() -> None:
    found = trajectory(rewards={"exact": None, "format": 1.0}, reward_errors={"exact": "ValueError: x"})
    assert weighted_reward(found, {}) == (0.0, "reward exact: ValueError: x")
