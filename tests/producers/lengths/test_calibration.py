from producers.lengths.calibration import Calibration
from schemas.messages.prompts import LengthEstimate
from schemas.settings import LoopSettings

LOOP = LoopSettings(bucket_boundaries=(64, 256))
ESTIMATE = LengthEstimate(median=50, upper=100, bucket=1, predictor="test")


def test_nothing_is_claimed_before_anything_is_seen() -> None:
    report = Calibration(LOOP).report()
    assert (report.coverage, report.mean_abs_error, report.predicted) == (None, None, (0, 0, 0))


def test_coverage_error_and_buckets_compare_estimates_with_lengths() -> None:
    calibration = Calibration(LOOP)
    for length in (40, 60, 100, 300):
        calibration.add(ESTIMATE, length)
    report = calibration.report()
    assert report.coverage == 0.75
    assert report.mean_abs_error == (10 + 10 + 50 + 250) / 4
    assert (report.predicted, report.actual) == ((0, 4, 0), (2, 1, 1))


def test_only_recent_completions_count() -> None:
    calibration = Calibration(LOOP, window=2)
    for length in (999, 1, 1):
        calibration.add(ESTIMATE, length)
    assert calibration.report().coverage == 1.0
