import math

import pytest

from producers.lengths.language_model import Example, lesson_of

EXAMPLES = [Example("x", "a", 10), Example("x", "a", 1000), Example("y", "a", 100), Example("x", "b", 7)]


def test_targets_are_over_the_level_of_their_data_set_and_stand_together_by_text() -> None:
    lesson = lesson_of(EXAMPLES)
    assert {name: count for name, (_, count) in lesson.levels.items()} == {"a": 3, "b": 1}
    assert [level for level, _ in lesson.levels.values()] == pytest.approx([math.log(100), math.log(7)])
    assert lesson.texts == ("x", "y", "x")
    restored = [[value * lesson.scale for value in values] for values in lesson.targets]
    assert restored == [pytest.approx([-math.log(10), math.log(10)]), pytest.approx([0]), pytest.approx([0])]


def test_a_later_lesson_keeps_the_scale_of_the_first() -> None:
    assert lesson_of(EXAMPLES, scale=2.0).scale == 2.0
    assert lesson_of([Example("x", "a", 0)]).scale > 0
    assert lesson_of([]).texts == ()
