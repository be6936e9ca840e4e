import pytest

from observability.run_state.aggregates import Rate


def test_a_rate_is_the_mean_of_its_window_and_fades_when_nothing_comes() -> None:
    rate = Rate(window_s=5.0)
    for index in range(500):
        rate.add(1000.0 + index / 100)
    assert rate.per_s(1005.0) == pytest.approx(100, rel=0.03)
    assert rate.per_s(1007.5) == pytest.approx(50, rel=0.06)
    assert rate.per_s(1020.0) == 0
    assert rate.total == 500


def test_late_arrivals_count_and_the_number_of_slots_is_bounded() -> None:
    rate = Rate(window_s=2.0)
    for index in range(10_000):
        rate.add(1000.0 + index)
        rate.add(900.0)
    assert len(rate._slots) <= 21
    assert rate.per_s(10_999.0) == pytest.approx(2.0)
