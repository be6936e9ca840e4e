import pytest
from pydantic import ValidationError

from consumers.algorithms.settings import AlgorithmSettings


def test_the_clip_range_is_symmetric_without_an_upper_epsilon() -> None:
    assert AlgorithmSettings(epsilon=0.1, epsilon_high=None).clip_range == pytest.approx((0.9, 1.1))
    assert AlgorithmSettings(epsilon=0.2, epsilon_high=0.3).clip_range == pytest.approx((0.8, 1.3))


def test_scaling_by_the_batch_with_a_kl_term_is_refused() -> None:
    with pytest.raises(ValidationError, match="the batch's deviation"):
        AlgorithmSettings(scale_rewards="batch", beta=0.1)


def test_an_overlong_cache_as_long_as_the_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="overlong_l_cache"):
        AlgorithmSettings(overlong_l_max=64, overlong_l_cache=64)
