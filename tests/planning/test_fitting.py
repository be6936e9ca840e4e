import random
from dataclasses import replace

import numpy as np
import pytest

from streamrl.planning.fitting import fit_decode, fit_prefill, fit_training, nonnegative
from streamrl.planning.measuring import DecodePoint, PrefillPoint, StepPoint
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

TABLE = ((1, 0.010), (2, 0.0105), (4, 0.012), (8, 0.016), (16, 0.025))
CONTEXT_S = 3e-7


def points(noise: float = 0.0, *, pads: bool = False) -> list[DecodePoint]:
    """Of an engine that reads what is there, or pads to the longest, which is twice the mean in batches."""
    chance = random.Random(0)
    return [
        DecodePoint(batch, batch * length, padded, step_s, step_s)
        for batch, seconds in TABLE
        for length in (8, 100, 1000, 4000)
        if (padded := batch * length * (2 if batch > 1 else 1))
        and (step_s := (seconds + CONTEXT_S * (padded if pads else batch * length)) * (1 + chance.gauss(0, noise)))
    ]


def table_of(decode: DecodeSettings) -> list[float]:
    return [seconds for _, seconds in decode.table]


@pytest.mark.parametrize("pads", [False, True])
def test_a_known_curve_is_recovered(pads: bool) -> None:
    decode, fitted = fit_decode(points(pads=pads))
    assert [batch for batch, _ in decode.table] == [1, 2, 4, 8, 16]
    assert table_of(decode) == pytest.approx([seconds for _, seconds in TABLE], rel=1e-6)
    assert decode.context_s_per_token == pytest.approx(CONTEXT_S, rel=1e-6)
    assert decode.padding_counts is pads
    assert max(abs(one.error) for one in fitted) < 1e-6


def test_noise_of_a_measurement_does_not_carry_over_into_the_curve() -> None:
    decode, _ = fit_decode(points(noise=0.05))
    assert table_of(decode) == pytest.approx([seconds for _, seconds in TABLE], rel=0.06)
    assert decode.context_s_per_token == pytest.approx(CONTEXT_S, rel=0.15)


def test_more_work_never_takes_less_time() -> None:
    falling = [
        DecodePoint(batch, 0, 0, seconds, seconds) for batch, seconds in ((1, 0.02), (2, 0.01), (4, 0.015), (8, 0.012))
    ]
    curve = DecodeCurve(fit_decode(falling)[0])
    assert [curve.batch_s(batch) for batch in range(1, 9)] == sorted(curve.batch_s(batch) for batch in range(1, 9))


def test_a_context_that_seems_to_speed_things_up_counts_as_none() -> None:
    shorter, longer = DecodePoint(1, 10, 10, 0.02, 0.02), DecodePoint(1, 1000, 1000, 0.01, 0.01)
    assert fit_decode([shorter, longer])[0].context_s_per_token == 0.0


def test_pauses_raise_the_curve_and_leave_its_shape() -> None:
    paused = [
        replace(point, mean_s=point.mean_s * (3.0 if index == 7 else 1.0)) for index, point in enumerate(points())
    ]
    level = sum(point.mean_s for point in paused) / sum(point.seconds for point in paused)
    decode, _ = fit_decode(paused)
    assert level > 1.05
    assert table_of(decode) == pytest.approx([level * seconds for _, seconds in TABLE], rel=1e-6)
    assert decode.context_s_per_token == pytest.approx(level * CONTEXT_S, rel=1e-6)


def test_noise_of_single_points_does_not_lower_the_whole() -> None:
    noisy = [replace(point, mean_s=point.seconds) for point in points(noise=0.4) if point.seconds > 0]
    _, fitted = fit_decode(noisy)
    assert sum(one.fitted_s for one in fitted) == pytest.approx(sum(point.seconds for point in noisy))


def test_a_prefill_takes_a_time_of_its_own_and_one_for_each_token() -> None:
    measured = [
        PrefillPoint(number, number * length, number * (0.002 + 5e-5 * length))
        for number in (1, 4)
        for length in (8, 64)
    ]
    each, per_token, fitted = fit_prefill([*measured, PrefillPoint(1, 8, 0.0)])
    assert (each, per_token) == pytest.approx((0.002, 5e-5))
    assert max(abs(one.error) for one in fitted) < 1e-6
    assert fit_prefill([]) == (0.0, 0.0, [])


def test_training_costs_are_measured_separately() -> None:
    def seconds(passes: int, tokens: int, squares: int) -> float:
        return 1e-5 * tokens + 2e-9 * squares + 0.004 * passes + 0.03

    measured = [
        StepPoint(passes, passes * rows * length, passes * rows * length**2, 0.0)
        for passes in (1, 3)
        for length in (16, 100, 600, 3000)
        for rows in (1, 4, 9)
    ]
    found, fitted = fit_training(
        [
            StepPoint(p.micro_batches, p.tokens, p.squares, seconds(p.micro_batches, p.tokens, p.squares))
            for p in measured
        ]
    )
    assert found.forward_backward_s_per_token == pytest.approx(1e-5, rel=1e-4)
    assert found.forward_backward_s_per_squared_token == pytest.approx(2e-9, rel=1e-4)
    assert found.forward_backward_s_per_micro_batch == pytest.approx(0.004, rel=1e-4)
    assert found.optimizer_step_s == pytest.approx(0.03, rel=1e-4)
    assert found.padding_counts
    assert max(abs(one.error) for one in fitted) < 1e-4


@pytest.mark.parametrize("mean", [0.0, 3.0])  # with 3, columns are alike, and a coefficient falls back to 0
@pytest.mark.parametrize("seed", range(20))
def test_coefficients_are_the_best_among_those_that_are_not_negative(seed: int, mean: float) -> None:
    chance = np.random.default_rng(seed)
    rows, values = chance.normal(mean, size=(12, 4)), chance.uniform(0.5, 2.0, 12)
    found = nonnegative(rows, values)
    weighted = rows / values[:, None]
    slope = weighted.T @ (1.0 - weighted @ found)
    assert (found >= 0).all()
    assert (slope <= 1e-7).all()  # nothing would be gained by more of any
    assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-7  # nor by less of what is there
