"""The paper's own case: its length histogram and decode curve, 1,024 samples, generation alone.

Placement is random with equally many samples on each instance (a random one that is not even is slower). Slots of a 7B
instance: its key-value cache of 114,688 bytes a token (28 layers, 8 heads of 128, two bytes, keys and values) in nine
tenths of the memory beside the weights. Of 32 GPUs of 80 GB half generate: 8 instances of two GPUs hold 1.12 M tokens
each, which is 64 completions of 17.5 K.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from benchmarks.pipeline.bounds.planned import planned
from benchmarks.pipeline.bounds.realised import makespan, round_robin
from benchmarks.pipeline.results import Row
from producers.generation.engines.length_trace import STREAMRL_BINS, LengthTraceSettings
from schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=0.00859, batch_scale=0.00859 / 0.0000527))
SAMPLES = 1024
PLANTS = ((8, 64), (8, 128), (4, 116), (16, 64))
"""Instances and slots; the first is the one the ceilings are compared with."""
STRATEGIES = ("lpt", "streamrl_sum", "streamrl_max", "skewness_aware")
PUBLISHED = {"perfect": 0.82, "degraded": 0.90}
RECALLS = {0.2: 0.87, 0.1: 0.82, 0.05: 0.76}
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Noise:
    """A ranker's error in normal scores: its standard deviation is ``base`` + ``tail`` × max(0, score)."""

    base: float
    tail: float

    def ranked(self, lengths: Sequence[int], rng: random.Random) -> list[int]:
        """Lengths as the ranker has them: the real ones, in an order that is only roughly right."""
        count = len(lengths)
        scores = []
        for rank, index in enumerate(np.argsort(lengths, kind="stable")):
            score = _NORMAL.inv_cdf((rank + 0.5) / count)
            scores.append((score + rng.gauss(0.0, self.base + self.tail * max(0.0, score)), int(index)))
        estimates = [0] * count
        for length, (_, index) in zip(sorted(lengths), sorted(scores), strict=True):
            estimates[index] = length
        return estimates


def draw(rng: random.Random, count: int = SAMPLES) -> list[int]:
    """Lengths from the paper's histogram."""
    ends = [*(start for start, _ in STREAMRL_BINS), LengthTraceSettings().histogram_end_tokens]
    shares = np.cumsum([0.0, *(share for _, share in STREAMRL_BINS)])
    return [int(length) for length in np.interp([rng.random() for _ in range(count)], shares / shares[-1], ends)]


def recall(lengths: Sequence[int], estimates: Sequence[float], share: float) -> float:
    """How much of the longest share is in the share that is estimated to be longest."""
    count = int(len(lengths) * share)
    real, told = (set(np.argsort(values, kind="stable")[-count:].tolist()) for values in (lengths, estimates))
    return len(real & told) / count


def calibrated(seeds: int) -> tuple[Noise, dict[float, float]]:
    """The noise whose recalls come closest to the published ones, and these recalls, means over seeds."""
    found = []
    for base in (0.14, 0.16, 0.18, 0.2, 0.22, 0.24):
        for tail in (0.0, 0.04, 0.08, 0.12, 0.16, 0.2):
            noise = Noise(base, tail)
            recalls = _recalls(noise, seeds)
            error = sum((recalls[share] - wanted) ** 2 for share, wanted in RECALLS.items())
            found.append((error, base, tail, recalls))
    _, base, tail, recalls = min(found, key=lambda entry: entry[0])
    return Noise(base, tail), recalls


def _recalls(noise: Noise, seeds: int) -> dict[float, float]:
    tried = []
    for seed in range(seeds):
        rng = random.Random(f"recall/{seed}")
        lengths = draw(rng)
        estimates = noise.ranked(lengths, rng)
        tried.append({share: recall(lengths, estimates, share) for share in RECALLS})
    return {share: fmean(one[share] for one in tried) for share in RECALLS}


def compare(seeds: int) -> list[Row]:
    """Every plant, ranker and strategy; generation time as a share of random placement's, means over seeds."""
    noise, recalls = calibrated(max(10, seeds))
    rows = []
    for instances, slots in PLANTS:
        for ranker in PUBLISHED:
            shares: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
            seconds = []
            for seed in range(seeds):
                rng = random.Random(f"paper/{seed}")
                lengths = draw(rng)
                estimates = lengths if ranker == "perfect" else noise.ranked(lengths, rng)
                base = makespan(round_robin(lengths, instances, slots), CURVE)
                seconds.append(base)
                for strategy in STRATEGIES:
                    queues = planned(strategy, lengths, estimates, instances, slots, CURVE)
                    shares[strategy].append(makespan(queues, CURVE) / base)
            rows += [
                _row(strategy, ranker, (instances, slots), fmean(seconds), found, recalls)
                for strategy, found in shares.items()
            ]
    return rows


def _row(
    strategy: str,
    ranker: str,
    plant: tuple[int, int],
    random_s: float,
    shares: list[float],
    recalls: dict[float, float],
) -> Row:
    share = fmean(shares)
    return {
        "workload": f"streamrl-7b-20k/{plant[0]}x{plant[1]}",
        "mode": "generation_alone",
        "dispatch": strategy,
        "ranker": ranker,
        "kind": "virtual",
        "trajectories_per_s": SAMPLES / (share * random_s),
        "ratio_to_synchronous": 1 / share,
        "ratio_to_bound": PUBLISHED[ranker] / share if plant == PLANTS[0] else None,
        "share_of_random": share,
        "share_range": [min(shares), max(shares)],
        "published_share": PUBLISHED[ranker],
        "recalls": [1.0, 1.0, 1.0] if ranker == "perfect" else [round(value, 3) for value in recalls.values()],
        "seeds": len(shares),
    }
