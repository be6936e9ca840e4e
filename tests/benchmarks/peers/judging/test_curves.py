"""Learning curves and the moments at which they reach a reward."""

import pytest

from benchmarks.peers.judging.curves import Point, common_target, ratio, seconds_to, smoothed, steps_to

RISING = [Point(0, 0.0, 0.2), Point(10, 20.0, 0.4), Point(20, 40.0, 0.8), Point(30, 60.0, 0.7)]


def test_the_moment_lies_on_the_line_between_two_points() -> None:
    assert seconds_to(RISING, 0.6) == pytest.approx(30.0)
    assert steps_to(RISING, 0.6) == pytest.approx(15.0)


def test_the_first_time_counts_even_if_the_reward_falls_again() -> None:
    assert seconds_to(RISING, 0.75) == pytest.approx(37.5)


def test_a_reward_that_was_there_at_the_start_takes_no_time() -> None:
    assert seconds_to(RISING, 0.1) == 0.0


def test_a_reward_never_reached_has_no_moment() -> None:
    assert seconds_to(RISING, 0.9) is None


def test_the_target_is_reached_by_every_contender() -> None:
    slow = [Point(0, 0.0, 0.2), Point(10, 99.0, 0.5)]
    target = common_target([RISING, slow], share=0.9)
    assert target == pytest.approx(0.47)
    assert seconds_to(RISING, target) is not None
    assert seconds_to(slow, target) is not None


def test_smoothing_keeps_the_first_policy_and_evens_out_the_others() -> None:
    even = smoothed(RISING)
    assert even[0] == RISING[0]
    assert [point.seconds for point in even] == [point.seconds for point in RISING]
    assert [round(point.reward, 3) for point in even[1:]] == [0.6, 0.633, 0.75]


def test_the_ratio_over_seeds_is_a_geometric_mean_and_missing_if_a_time_is() -> None:
    assert ratio([1.0, 4.0], [2.0, 2.0]) == pytest.approx(1.0)
    assert ratio([1.0, None], [2.0, 2.0]) is None
