import math
from functools import partial

import numpy as np
import pytest

from streamrl.producers.generation.engines.length_trace import LengthTraceSettings, trace_length
from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.calibration import recall_of_longest
from streamrl.producers.lengths.predictor import TraceLengths
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.lengths.startup import build_predictor
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt

DRAWN = LengthTraceSettings(prompt_share=0.5)


def _prompt(number: int, **columns: object) -> Prompt:
    return Prompt(prompt_id=f"d/{number}", dataset="d", content="x", columns=columns)


def _trace(samples: int = 1, noise: float = 0.0, limit: int = 10_000) -> TraceLengths:
    loop = LoopSettings(num_generations=samples, max_completion_length=limit, bucket_boundaries=(500, 2000))
    return TraceLengths(loop, Buckets(loop.bucket_boundaries), partial(trace_length, DRAWN), noise)


def _true(number: int, index: int = 0, data_pass: int = 0) -> int:
    return trace_length(DRAWN, f"d/{number}/{data_pass}", index, _prompt(number))


def test_the_exact_length_of_a_single_sample_is_predicted() -> None:
    for number in range(50):
        estimate, length = _trace().predict(_prompt(number), f"d/{number}/0"), min(10_000, _true(number))
        assert (estimate.median, estimate.upper) == (length, length)
        assert estimate.bucket == (length >= 500) + (length >= 2000)


def test_the_median_and_the_longest_length_of_a_group_are_predicted() -> None:
    lengths = sorted(_true(3, index) for index in range(5))
    estimate = _trace(samples=5, limit=10**6).predict(_prompt(3), "d/3/0")
    assert (estimate.median, estimate.upper) == (lengths[2], lengths[4])


def test_another_pass_over_the_data_has_other_lengths_and_without_its_name_the_first_is_meant() -> None:
    trace = _trace(limit=10**6)
    assert trace.predict(_prompt(3), "d/3/1").median == _true(3, data_pass=1)
    assert trace.predict(_prompt(3)).median == _true(3) != _true(3, data_pass=1)


def test_no_estimate_is_above_the_limit() -> None:
    assert max(_trace(limit=700).predict(_prompt(number)).upper for number in range(50)) == 700


def test_noise_is_lognormal_with_its_sigma_and_the_same_whenever_asked() -> None:
    noisy, again = _trace(noise=0.5, limit=10**9), _trace(noise=0.5, limit=10**9)
    ratios = [math.log(noisy.predict(_prompt(number)).median / _true(number)) for number in range(2000)]
    assert np.mean(ratios) == pytest.approx(0, abs=0.04)
    assert np.std(ratios) == pytest.approx(0.5, rel=0.06)
    assert noisy.predict(_prompt(7)) == again.predict(_prompt(7))


def test_more_noise_ranks_worse() -> None:
    lengths = [_true(number) for number in range(2000)]
    recalls = []
    for noise in (0.0, 0.5, 3.0, 100.0):
        trace = _trace(noise=noise, limit=10**12)
        recall = recall_of_longest([trace.predict(_prompt(number)).median for number in range(2000)], lengths)
        recalls.append(recall or 0.0)
    assert recalls[0] == 1.0
    assert recalls == sorted(recalls, reverse=True)
    assert 0.2 <= recalls[-1] < 0.5


def test_a_prompt_without_its_column_gets_an_estimate_all_the_same() -> None:
    loop = LoopSettings(max_completion_length=800)
    given = LengthTraceSettings(source="column")
    predictor = build_predictor(LengthSettings(predictor="trace"), loop, partial(trace_length, given))
    assert predictor.predict(_prompt(1, length=70)).median == 70
    estimate = predictor.predict(_prompt(1))
    assert isinstance(estimate, LengthEstimate)
    assert (estimate.upper, estimate.predictor) == (800, "trace/none")


def test_a_run_that_is_not_emulated_has_no_trace() -> None:
    with pytest.raises(SettingsError, match="emulated"):
        build_predictor(LengthSettings(predictor="trace"), LoopSettings())
