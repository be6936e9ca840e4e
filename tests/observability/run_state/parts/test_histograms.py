import pytest

from observability.run_state.aggregates import CLASSES, Calibration, Staleness, length_class


def test_lengths_fall_into_two_classes_a_doubling() -> None:
    assert [length_class(tokens) for tokens in (0, 1, 2, 4, 1024)] == [0, 0, 2, 4, 20]
    assert length_class(1 << 60) == CLASSES - 1


def test_the_share_of_close_predictions() -> None:
    calibration = Calibration()
    for predicted, actual in ((100, 100), (140, 100), (100, 200), (0, 0)):
        calibration.add(predicted, actual)
    assert calibration.close_share == 0.75
    assert Calibration().close_share is None


def test_old_counts_fade() -> None:
    calibration, staleness = Calibration(), Staleness()
    for _ in range(100_000):
        calibration.add(10, 10)
    staleness.add([2] * 100_000)
    assert calibration.count < 50_000
    assert sum(staleness.counts.values()) == pytest.approx(50_000)
    staleness.add([-1, 10_000])
    assert set(staleness.counts) == {0, 2, CLASSES - 1}
