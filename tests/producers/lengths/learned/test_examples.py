import math

import pytest

from streamrl.producers.lengths.learned.language_model import make_training_set
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.schemas.trajectories import Prompt


def _completion(text: str, dataset: str, length: int) -> ObservedCompletion:
    return ObservedCompletion(Prompt(prompt_id=text, dataset=dataset, content=text), "g", length)


COMPLETIONS = [
    _completion("x", "a", 10),
    _completion("x", "a", 1000),
    _completion("y", "a", 100),
    _completion("x", "b", 7),
]


def test_targets_are_over_the_level_of_their_data_set_and_stand_together_by_text() -> None:
    examples = make_training_set(COMPLETIONS)
    assert {name: count for name, (_, count) in examples.levels.items()} == {"a": 3, "b": 1}
    assert [level for level, _ in examples.levels.values()] == pytest.approx([math.log(100), math.log(7)])
    assert examples.texts == ("x", "y", "x")
    restored = [[value * examples.scale for value in values] for values in examples.targets]
    assert restored == [pytest.approx([-math.log(10), math.log(10)]), pytest.approx([0]), pytest.approx([0])]


def test_a_later_examples_keeps_the_scale_of_the_first() -> None:
    assert make_training_set(COMPLETIONS, scale=2.0).scale == 2.0
    assert make_training_set([_completion("x", "a", 0)]).scale > 0
    assert make_training_set([]).texts == ()
