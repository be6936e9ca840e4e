"""Lengths of the emulated benchmark: lognormal, median 1,000, 99th percentile ten times that."""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from streamrl.schemas.profiles import DecodeCurve


def benchmark_lengths(count: int, seed: int, cap: int = 10_000) -> list[int]:
    rng, sigma = random.Random(seed), math.log(10) / NormalDist().inv_cdf(0.99)
    return [min(cap, max(1, round(1000 * math.exp(rng.gauss(0, sigma))))) for _ in range(count)]


def ideal_s(lengths: Sequence[int], workers: int, slots: int, curve: DecodeCurve) -> float:
    """With all slots busy until the end."""
    return sum(lengths) * curve.batch_s(slots) / (workers * slots)
