from typing import Any

import pytest
from pydantic import ValidationError

from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings


def test_the_clip_range_is_symmetric_without_an_upper_epsilon() -> None:
    assert AlgorithmSettings(epsilon=0.1, epsilon_high=None).clip_range == pytest.approx((0.9, 1.1))
    assert AlgorithmSettings(epsilon=0.2, epsilon_high=0.3).clip_range == pytest.approx((0.8, 1.3))


def test_a_name_brings_its_defaults_and_given_values_override_them() -> None:
    assert AlgorithmSettings(name="gspo").epsilon_high == 4e-4
    found = AlgorithmSettings(name="gspo", epsilon_high=0.1)
    assert (found.policy_loss, found.epsilon, found.epsilon_high) == ("gspo", 3e-4, 0.1)
    assert found.changed() == {"epsilon_high": 0.1}
    assert AlgorithmSettings.model_validate(found.model_dump()) == found


def test_every_name_of_the_shelf_can_be_chosen_by_itself() -> None:
    for name in set(PRESETS) - {"distillation"}:
        assert AlgorithmSettings(name=name).changed() == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"scale_rewards": "batch", "beta": 0.1}, "the batch's deviation"),
        ({"name": "dppo", "scale_rewards": "batch"}, "another policy_loss than dppo"),
        ({"scale_rewards": "batch", "name": "rft"}, "divides centred rewards"),
        ({"scale_rewards": "batch", "name": "ppo"}, "divides centred rewards"),
        ({"overlong_l_max": 64, "overlong_l_cache": 64}, "overlong_l_cache"),
        ({"name": "grpoo"}, "did you mean grpo?"),
        ({"name": "reinforce++"}, "did you mean reinforce_plus_plus?"),
        ({"name": "online_dpo"}, "did you mean dpo?"),
        ({"name": "mymodule.MyAlgorithm"}, "or package.module:Class"),
        ({"name": "dpo", "beta": 0.1}, "algorithm.preference.beta for dpo"),
        ({"name": "distillation"}, "algorithm.teacher.path"),
        ({"name": "grpo", "kl_in_reward": True, "beta": 0.1}, "ppo or reinforce_plus_plus"),
        ({"name": "ppo", "kl_in_reward": True}, "algorithm.beta above 0"),
        ({"kl_estimator": "k1", "beta": 0.1, "use_bias_correction_kl": False}, "is 0 in expectation"),
        ({"importance_sampling_mode": "sequence_truncate"}, 'algorithm.ratio="proximal"'),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AlgorithmSettings.model_validate(given)
    (error,) = refused.value.errors()
    assert told in error["msg"]
    assert "\n" not in error["msg"]
