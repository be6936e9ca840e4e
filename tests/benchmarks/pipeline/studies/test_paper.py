import random

import pytest

from benchmarks.pipeline.studies.paper import Noise, draw, recall


def test_the_histogram_has_the_papers_quantiles() -> None:
    lengths = sorted(draw(random.Random(0), 50_000))
    assert lengths[25_000] == pytest.approx(3206, rel=0.03)
    assert lengths[45_000] == pytest.approx(12_940, rel=0.05)
    assert sum(lengths) / len(lengths) == pytest.approx(4934, rel=0.05)


def test_without_noise_the_ranker_is_perfect() -> None:
    lengths = draw(random.Random(0))
    assert recall(lengths, Noise(0.0, 0.0).ranked(lengths, random.Random(1)), 0.2) == 1.0


def test_noise_costs_recall_and_keeps_the_lengths() -> None:
    lengths = draw(random.Random(0))
    estimates = Noise(0.5, 0.0).ranked(lengths, random.Random(1))
    assert 0.5 < recall(lengths, estimates, 0.2) < 0.9
    assert sorted(estimates) == sorted(lengths)
