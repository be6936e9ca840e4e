import random

import pytest

from streamrl.producers.lengths.calibration import Calibration
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate

LOOP = LoopSettings(bucket_boundaries=(64, 256))
ESTIMATE = LengthEstimate(median=50, upper=100, bucket=1, predictor="test")


def test_nothing_is_claimed_before_anything_is_seen() -> None:
    report = Calibration(LOOP).report()
    assert (report.coverage, report.mean_abs_error, report.predicted) == (None, None, (0, 0, 0))


def test_coverage_error_and_buckets_compare_estimates_with_lengths() -> None:
    calibration = Calibration(LOOP)
    for length in (40, 60, 100, 300):
        calibration.observe(ESTIMATE, length)
    report = calibration.report()
    assert report.coverage == 0.75
    assert report.mean_abs_error == (10 + 10 + 50 + 250) / 4
    assert (report.predicted, report.actual) == ((0, 4, 0), (2, 1, 1))


def test_only_recent_completions_count() -> None:
    calibration = Calibration(LOOP, window=2)
    for length in (999, 1, 1):
        calibration.observe(ESTIMATE, length)
    assert calibration.report().coverage == 1.0


def test_orders_are_compared_with_one_guess_for_all_and_with_the_data_sets_own_level() -> None:
    """Two data sets of different lengths: the baseline by data set sees that much, ours sees every length."""
    calibration, rng = Calibration(LOOP), random.Random(1)
    for number in range(400):
        dataset = "long" if number % 2 else "short"
        length = rng.randint(1, 60) + (100 if dataset == "long" else 0)
        calibration.observe(ESTIMATE.model_copy(update={"median": length, "upper": length + 5}), length, dataset)
    report = calibration.report()
    assert (report.ours.recall, report.ours.tau, report.ours.coverage) == (1.0, 1.0, 1.0)
    assert report.constant.recall == pytest.approx(0.2, abs=0.03)
    assert report.constant.tau == 0.0
    assert report.per_dataset.tau is not None
    assert 0.4 < report.per_dataset.tau < 0.9
    assert report.per_dataset.coverage is not None
    assert 0.85 < report.per_dataset.coverage < 0.95


def test_a_baseline_knows_only_what_came_before() -> None:
    calibration = Calibration(LOOP)
    calibration.observe(ESTIMATE, 500, "a")
    calibration.observe(ESTIMATE, 900, "a")
    assert calibration.report().per_dataset.coverage == 0.5


def test_the_report_says_who_made_the_estimates_and_fits_a_line_of_the_log() -> None:
    calibration = Calibration(LOOP)
    for name in ("learned/v1", "learned/v2", "observed_quantiles/all"):
        calibration.observe(ESTIMATE.model_copy(update={"predictor": name}), 10, "a")
    fields = calibration.report().fields()
    assert fields["lengths_by"] == {"learned": 2, "observed_quantiles": 1}
    assert fields["length_coverage"] == 1.0
    assert {"length_recall", "length_tau_per_dataset", "length_recall_constant"} <= set(fields)
