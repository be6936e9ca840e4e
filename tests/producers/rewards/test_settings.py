import pytest
from pydantic import ValidationError

from streamrl.producers.rewards.settings import RewardSettings


def test_names_are_function_names_and_repeats_are_numbered() -> None:
    settings = RewardSettings(functions=("dataset", "a.b:score", "c:score", "d:score"))
    assert settings.names == ("dataset", "score", "score_2", "score_3")


def test_weights_are_one_unless_given() -> None:
    assert RewardSettings(functions=("dataset", "a:f")).weight_by_name == {"dataset": 1.0, "f": 1.0}
    assert RewardSettings(functions=("dataset", "a:f"), weights=(1, -0.5)).weight_by_name == {"dataset": 1, "f": -0.5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": ()},
        {"functions": ("just_a_name",)},
        {"functions": ("a:b:c",)},
        {"functions": ("dataset",), "weights": (1.0, 2.0)},
        {"functions": ("dataset",), "weights": (float("nan"),)},
        {"functions": ("dataset", "a:f"), "weights": (0, 0.0)},
        {"timeout_s": 0},
        {"format_pattern": "("},
        {"answer_pattern": "[a"},
    ],
)
def test_contradictions_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardSettings.model_validate(wrong)


def test_a_misspelt_name_of_a_reward_that_comes_along_is_named_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="did you mean 'math_verify'"):
        RewardSettings(functions=("mathverify",))
    assert RewardSettings(functions=("math_verify", "format")).names == ("math_verify", "format")
