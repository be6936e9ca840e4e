import pytest
from pydantic import ValidationError

from streamrl.schemas.profiles import DecodeCurve, DecodeSettings


def test_the_formula_doubles_at_the_batch_scale() -> None:
    curve = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=64))
    assert [curve.batch_s(batch) for batch in (1, 64, 192)] == pytest.approx([0.01 * 65 / 64, 0.02, 0.04])


def test_a_table_is_linear_between_its_points_and_along_the_last_two_beyond() -> None:
    curve = DecodeCurve(DecodeSettings(table=((2, 0.01), (4, 0.02), (8, 0.03))))
    assert [curve.batch_s(batch) for batch in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx(
        [0.01, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05]
    )
    assert DecodeCurve(DecodeSettings(table=((4, 0.02),))).batch_s(64) == 0.02


@pytest.mark.parametrize("table", [((4, 0.1), (2, 0.2)), ((2, 0.2), (4, 0.1))])
def test_a_table_that_does_not_ascend_is_refused(table: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValidationError, match="ascending"):
        DecodeSettings(table=table)


@pytest.mark.parametrize("context_s", [0.0, 1e-7, 1e-4])
def test_a_leg_is_the_sum_of_its_steps(context_s: float) -> None:
    curve = DecodeCurve(DecodeSettings(context_s_per_token=context_s))
    total, context = 0.0, 100
    for steps in range(1, 60):
        total += curve.batch_s(5) + context_s * context
        context += 5
        assert curve.leg_s(steps, 5, 100) == pytest.approx(total)
        assert curve.steps_by(total + 1e-9, 0.0, 5, 100) == steps
        assert curve.steps_by(total - 1e-9, 0.0, 5, 100) == steps - 1
        assert curve.steps_until(total + 1e-9, 0.0, 5, 100) == steps + 1
        assert curve.steps_until(total - 1e-9, 0.0, 5, 100) == steps
