import random

import pytest

from streamrl.producers.lengths.learned.predictor import ENOUGH, WINDOW, Margins, Residuals


def test_nothing_is_moved_before_enough_is_known() -> None:
    margins = Margins(0.9)
    for _ in range(ENOUGH - 1):
        margins.add("a", 1.0)
    assert margins.of("a") == 0.0
    margins.add("b", 1.0)
    assert margins.of("a") == 1.0


def test_the_margin_covers_the_share_it_promises_by_data_set() -> None:
    margins, rng = Margins(0.9), random.Random(0)
    for _ in range(WINDOW):
        margins.add("narrow", rng.gauss(0, 0.1))
        margins.add("wide", rng.gauss(0, 1.0))
    for name, spread in (("narrow", 0.1), ("wide", 1.0)):
        covered = sum(rng.gauss(0, spread) <= margins.of(name) for _ in range(4000)) / 4000
        assert covered == pytest.approx(0.9, abs=0.03)


def test_only_recent_residuals_count() -> None:
    residuals = Residuals()
    for index in range(3 * WINDOW):
        residuals.add(5.0 if index < 2 * WINDOW else 1.0)
    assert (len(residuals), residuals.quantile(0.9)) == (WINDOW, 1.0)
